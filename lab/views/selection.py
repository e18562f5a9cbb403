"""How a token's cells are chosen: the scores of blocks and the cut, and the passes that find it."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..qsa.readings import Chosen
from ..qsa.selection import BLOCK, DIGIT_BITS, Cut, RadixPass, Selection
from .style import (
    OKABE_ITO,
    REFERENCE,
    around_zero,
    behind,
    centred,
    dim,
    domains,
    faint,
    figure,
    heading,
    ink,
    kernel_colour,
    note,
    pooled,
)

__all__ = ["block_scores", "radix_passes"]

BLOCKS = 1200  # points of the scores, at most
NEAR = 10  # blocks on each side of the cut that are shown by rank
TIES = 8  # blocks at the cut that are shown in any case

# Classes of blocks, by what becomes of them: name, symbol.
_ABOVE, _TIE, _TIE_LEFT, _BELOW, _UNKNOWN, _ALL = range(6)
_CLASSES = (
    ("above the cut", "circle"),
    ("at the cut, taken", "diamond"),
    ("at the cut, left out", "diamond-open"),
    ("below", "x-thin-open"),
    ("blocks", "circle"),
    ("all taken", "circle"),
)


def block_scores(chosen: Chosen, *, dark: bool = False) -> go.Figure:
    """The score of each block of four cells, and the cut: which blocks a token attends to.

    On the left are the scores in the order of the cells, as the kernel wrote them. The dashed line is the
    cut: blocks above it are taken whole (dots), those below it left out (crosses); of those that lie on it
    (diamonds) as many cells are taken as the budget has room for. An unfinished block has no score of its own
    and stands at the upper edge as a triangle. On the right are the blocks next to the cut in the order of
    their scores: the margin is the step down from the last block taken to the first one left out. Below is
    kernel minus reference.
    """
    scores, reference = chosen.scores.astype(float), np.asarray(chosen.reference_scores, float)
    title = f"Token {chosen.token}: block scores"
    if np.isnan(scores).all() and np.isnan(reference).all():
        return note(title, "The blocks have no scores yet.", dark)
    selection = chosen.selection
    cut = selection.cut if selection is not None else None
    written = not np.isnan(scores).all()
    main = scores if written else reference
    finite = np.isfinite(main)
    top = float(np.max(main, where=finite, initial=-np.inf))
    low = float(np.min(main, where=finite, initial=np.inf))
    top, low = (top, low) if top >= low else (1.0, 0.0)
    room = (top - low) * 0.08 or 1.0
    drawn = np.clip(main, low - room, top + room)  # infinities lie on the edges
    # The highest stand for their neighbours: shifted, so that they are the furthest from zero as well.
    small = pooled((drawn - low + 2 * room)[None], (1, BLOCKS))
    shown = small.columns[0]
    if cut is not None and small.factors[1] > 1:
        shown = np.union1d(shown, [*cut.ties[:TIES], cut.last_block])
    with np.errstate(invalid="ignore"):
        off = scores - reference
    told = np.stack([scores, reference, off, BLOCK * np.arange(len(scores))], -1)
    data = _points(main, drawn, shown, selection, told, dark)
    if not written:
        data[0]["name"], data[0]["marker"] = "reference", _AWAITED
    data.append(
        {
            "type": "scatter",
            "mode": "lines" if len(shown) > 96 else "markers",
            "name": "difference",
            "x": shown,
            "y": off[shown],
            "yaxis": "y2",
            "customdata": told[shown],
            "hovertemplate": _HOVER,
            "line": {"width": 1, "color": kernel_colour(dark)},
            "marker": {"size": 5, "color": kernel_colour(dark)},
            "showlegend": False,
        }
    )
    left, right = domains(0.74, 0.26, gap=0.075)
    lower, upper = domains(0.25, 0.75, gap=0.09)
    notes, shapes = [], []
    if cut is not None and selection is not None:
        near = _near(cut, scores, _classes(len(scores), selection), dark)
        data.append({**near, "customdata": told[near["customdata"]]})
        notes.append({**heading("blocks next to the cut, by rank", right), "yshift": 2})
        dashed = {"type": "line", "line": {"color": ink(dark), "width": 1.2, "dash": "dash"}}
        level = {"y0": cut.score, "y1": cut.score, "x0": 0, "x1": 1}
        if np.isfinite(cut.score):
            shapes = [
                {**dashed, **level, "xref": f"{x} domain", "yref": y} for x, y in (("x", "y"), ("x2", "y3"))
            ]
        title += f" · cut at {cut.score:.6g}" + (
            f", margin {cut.margin:.3g}" if cut.margin is not None else ""
        )
    elif selection is not None:
        title += f" · every cell is taken: {chosen.n_kv} with a budget of {chosen.budget}"
    elif not written:
        notes.append(centred("not written yet", 0.5, 0.7, dark))
    edge = left if cut is not None else (0.0, 1.0)
    width = len(scores)
    return figure(
        data,
        title,
        dark,
        height=330,
        margin={"t": 76, "l": 68},
        shapes=shapes,
        annotations=notes,
        xaxis={
            "domain": edge, "anchor": "y2", "range": [-width * 0.01, width * 1.01 - 1], "showgrid": False,
            "tickformat": "d", "title": {"text": small.title(1, f"block of {BLOCK} cells")},
        },
        yaxis={"domain": upper, "title": {"text": "score"}},
        yaxis2={
            "domain": lower, "title": {"text": "difference"}, "zeroline": True, "zerolinecolor": ink(dark),
            **around_zero(off[shown]),
        },
        **(_near_axes(right, upper) if cut is not None else {}),
    )  # fmt: skip


_HOVER = (
    "block %{x}, cells from %{customdata[3]:d}<br>score %{customdata[0]:.8g}"
    "<br>reference %{customdata[1]:.8g}<br>difference %{customdata[2]:.2e}<extra>%{fullData.name}</extra>"
)
_AWAITED = {"color": REFERENCE, "symbol": "diamond-open", "size": 5}


def _points(
    scores: np.ndarray,
    drawn: np.ndarray,
    shown: np.ndarray,
    selection: Selection | None,
    told: np.ndarray,
    dark: bool,
) -> list[dict[str, Any]]:
    """A trace for each class of blocks that there is."""
    classes, colours = _classes(len(scores), selection), _colours(dark)
    data = []
    for number, (name, symbol) in enumerate(_CLASSES):
        mine = shown[classes[shown] == number]
        if not len(mine):
            continue
        size = 8 if number in (_TIE, _TIE_LEFT) else 4.5 if len(shown) > 96 else 7
        marker: dict[str, Any] = {
            "color": colours[number],
            "symbol": symbol,
            "size": size,
            "line": {"width": 1},
        }
        infinite = np.isinf(scores[mine])
        if infinite.any():
            marker["symbol"] = ["triangle-up" if x else symbol for x in infinite]
            marker["size"] = np.where(infinite, 10, size)
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": f"{name} ({int((classes == number).sum())})",
                "x": mine,
                "y": drawn[mine],
                "customdata": told[mine],
                "hovertemplate": _HOVER,
                "marker": marker,
            }
        )
    return data


def _classes(count: int, selection: Selection | None) -> np.ndarray:
    """The class of each block."""
    if selection is None:
        return np.full(count, _UNKNOWN)
    if selection.cut is None:
        return np.full(count, _ALL)
    classes = np.full(count, _BELOW)
    classes[selection.cut.above] = _ABOVE
    classes[selection.cut.ties] = _TIE_LEFT
    classes[selection.cut.ties[: selection.cut.ties_taken]] = _TIE
    return classes


def _colours(dark: bool) -> tuple[str, ...]:
    tie = OKABE_ITO["vermillion"]
    return kernel_colour(dark), tie, tie, dim(dark), kernel_colour(dark), kernel_colour(dark)


def _near(cut: Cut, scores: np.ndarray, classes: np.ndarray, dark: bool) -> dict[str, Any]:
    """A trace of the blocks next to the cut, by rank; for now, ``customdata`` is their numbers."""
    order = np.argsort(-scores, kind="stable")
    rank = int(np.flatnonzero(order == cut.last_block)[0])
    start = max(0, rank - NEAR + 1)
    blocks = order[start : rank + NEAR + 1]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "next to the cut",
        "xaxis": "x2",
        "yaxis": "y3",
        "x": np.arange(start, start + len(blocks)) + 1,
        "y": np.where(np.isfinite(scores[blocks]), scores[blocks], np.nan),
        "text": np.array([f"block {b}, {_CLASSES[classes[b]][0]}" for b in blocks], object),
        "customdata": blocks,
        "hovertemplate": "rank %{x}: %{text}<br>score %{customdata[0]:.8g}<br>reference %{customdata[1]:.8g}"
        "<br>difference %{customdata[2]:.2e}<extra></extra>",
        "marker": {
            "color": [_colours(dark)[classes[b]] for b in blocks],
            "symbol": [_CLASSES[classes[b]][1] for b in blocks],
            "size": 7,
            "line": {"width": 1},
        },
        "showlegend": False,
    }


def _near_axes(across: tuple[float, float], up: tuple[float, float]) -> dict[str, Any]:
    return {
        "xaxis2": {
            "domain": across,
            "anchor": "y3",
            "title": {"text": "rank"},
            "nticks": 5,
            "tickformat": "d",
        },
        "yaxis3": {"domain": up, "anchor": "x2", "nticks": 6},
    }


# ---- the passes of the radix select --------------------------------------------------------------------


def radix_passes(selection: Selection, *, dark: bool = False) -> go.Figure:
    """How the cut is found, digit by digit: four histograms, of which each looks into one bar of the last.

    Keys are the scores as whole numbers of 32 bits in the same order. A pass counts cells by the next 8 bits
    of their key, among those whose key begins with the digits found so far. From the greatest digit
    downwards, whole bars are taken (blue) as long as they fit into the cells still wanted; the bar under the
    arrow is the first that does not fit, or just fits: its digit is the next one of the cut, and the next
    pass looks into it. Lower digits (grey) are left out. After four passes the key of the cut is known.
    """
    cut = selection.cut
    if cut is None:
        told = f"Every cell is taken: {selection.n_kv} with a budget of {selection.budget}. No pass runs."
        return note("Radix select", told, dark)
    places = domains(*[1] * len(cut.passes), gap=0.045)
    data: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    for number, (radix, place) in enumerate(zip(cut.passes, places, strict=True), 1):
        which = "" if number == 1 else str(number)
        data += _bars(radix, which, number == 1, dark)
        there = np.flatnonzero(radix.histogram)
        at, most = int(np.searchsorted(there, radix.digit)), int(radix.histogram.max())
        axes[f"xaxis{which}"] = {"domain": place, "anchor": f"y{which}", "showgrid": False, **_digits(there)}
        axes[f"yaxis{which}"] = {
            "anchor": f"x{which}", "range": [0, most * 1.32], "nticks": 4, "tickformat": "d",
            "title": {"text": "cells" if number == 1 else ""},
        }  # fmt: skip
        arrow = {
            "x": at, "y": int(radix.histogram[radix.digit]), "xref": f"x{which}", "yref": f"y{which}",
            "yanchor": "bottom", "font": {"color": OKABE_ITO["vermillion"], "size": 12}, "borderpad": 0,
        }  # fmt: skip
        # Near an edge the digit is written inwards.
        side = (
            ("left", "center", "right")[min(2, 3 * at // max(len(there), 1))] if len(there) > 6 else "center"
        )
        notes.append({**arrow, "text": "▼"})
        notes.append(
            {
                **arrow,
                "text": f"<b>0x{radix.digit:02X}</b>",
                "yshift": 12,
                "xanchor": side,
                "bgcolor": behind(dark),
            }
        )
        bits = f"pass {number}: bits {radix.shift + DIGIT_BITS - 1}–{radix.shift}"
        wanted = f"{radix.wanted} wanted → {radix.still_wanted}"
        notes.append(heading(f"{bits}<br>{wanted}", place))
    key = f"{cut.key:08X}"
    spaced = " ".join(key[i : i + 2] for i in range(0, 8, 2))
    return figure(
        data,
        f"Radix select: the cut is at key {spaced}, score {cut.score:.7g}",
        dark,
        height=290,
        margin={"t": 94, "l": 56},
        legend={"traceorder": "normal"},
        barmode="overlay",
        bargap=0,
        annotations=notes,
        **axes,
    )


def _bars(radix: RadixPass, which: str, named: bool, dark: bool) -> list[dict[str, Any]]:
    digits = np.flatnonzero(radix.histogram)
    found = []
    for name, mine, colour in (
        ("greater digits: all taken", digits[digits > radix.digit], kernel_colour(dark)),
        ("▼ digit of the cut", digits[digits == radix.digit], OKABE_ITO["vermillion"]),
        ("lower digits: left out", digits[digits < radix.digit], faint(dark)),
    ):
        if not len(mine) and not named:
            continue
        found.append(
            {
                "type": "bar",
                "name": name,
                "legendgroup": name,
                "showlegend": named,
                "xaxis": f"x{which}",
                "yaxis": f"y{which}",
                "x": np.searchsorted(digits, mine),
                "y": radix.histogram[mine],
                "width": 0.86,
                "text": np.array([f"0x{digit:02X}" for digit in mine.tolist()], object),
                "textposition": "none",
                "customdata": radix.at_or_above[mine],
                "hovertemplate": "digit %{text}: cells %{y}<br>at or above: %{customdata}"
                f"<br>wanted: {radix.wanted}<extra></extra>",
                "marker": {"color": colour, "line": {"width": 0}},
            }
        )
    return found


def _digits(there: np.ndarray) -> dict[str, Any]:
    """An axis over the digits that there are, side by side, in hexadecimal."""
    count = len(there)
    ticks = np.unique(np.linspace(0, count - 1, min(count, 5)).round().astype(int))
    return {
        "range": [-max(0.8, count * 0.04), count - 1 + max(0.8, count * 0.04)],
        "tickvals": ticks,
        "ticktext": [f"{digit:02X}" for digit in there[ticks].tolist()],
        "title": {"text": "digits that there are"},
    }
