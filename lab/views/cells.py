"""The cells that a token attends to, along the cell axis: the kernel's list beside the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..qsa.readings import Chosen
from .style import OKABE_ITO, centred, domains, figure, ink, kernel_colour, note

__all__ = ["chosen_cells"]

SPANS = 256  # of the cell axis, at most
TOLD = 8  # cells that a hover text lists


def chosen_cells(chosen: Chosen, *, dark: bool = False) -> go.Figure:
    """Which of the cells that a token sees it attends to: by the kernel's list, upwards, and by the selection
    that follows from the scores, downwards.

    A bar is the share of its span of cells that is in the list; where both lists are the same the picture is
    its own mirror image. Upwards, what only the kernel has (an extra) stands on top of what both have (a
    hit); downwards, so does what only the reference has (a miss). In the lines below, misses (▼), extras (▲),
    the cells of blocks whose score is that of the cut (◆) and planted needles (★, hollow where the kernel
    lost them) are marked where they are.
    """
    title = f"Token {chosen.token}: chosen cells"
    if chosen.kernel_ids is None and chosen.selection is None:
        return note(title, "The blocks have no scores yet, and nothing is listed.", dark)
    n_kv = chosen.n_kv
    span = -(-n_kv // SPANS)
    count = -(-n_kv // span)
    first = span * np.arange(count)
    last = np.minimum(first + span, n_kv) - 1
    length = last - first + 1
    middle = (first + last) / 2
    known = chosen.kernel_ids is not None and chosen.selection is not None
    listed = _seen(chosen.kernel_ids, n_kv)
    expected = _seen(chosen.selection.ids if chosen.selection is not None else None, n_kv)
    hits = listed & expected if known else np.zeros(n_kv, bool)
    parts = (
        ("hits" if known else "kernel", 1, listed & (expected if known else True), kernel_colour(dark), ""),
        ("extras", 1, listed & ~expected if known else hits, OKABE_ITO["orange"], "/"),
        (
            "hits" if known else "reference",
            -1,
            expected & (listed if known else True),
            kernel_colour(dark),
            "",
        ),
        ("misses", -1, expected & ~listed if known else hits, OKABE_ITO["vermillion"], "x"),
    )
    told = np.stack([first, last], -1)
    data: list[dict[str, Any]] = []
    for name, side, flags, colour, pattern in parts:
        cells = np.add.reduceat(flags, first)
        if not cells.any():
            continue
        data.append(
            {
                "type": "bar",
                "name": name,
                "x": middle,
                "width": span,
                "y": side * cells / length,
                "customdata": np.column_stack([told, cells]),
                "hovertemplate": "cells %{customdata[0]} to %{customdata[1]}<br>"
                f"{name}: %{{customdata[2]}}<extra>{'kernel' if side > 0 else 'reference'}</extra>",
                "marker": {
                    "color": colour,
                    "line": {"width": 0},
                    "pattern": {"shape": pattern, "size": 4, "fillmode": "overlay", "fgcolor": ink(dark)},
                },
                "showlegend": False,
            }
        )
    lines: list[tuple[str, Any, str, str]] = [
        ("misses", chosen.misses, "triangle-down", OKABE_ITO["vermillion"]),
        ("extras", chosen.extras, "triangle-up", OKABE_ITO["orange"]),
        ("at the cut", chosen.ties, "diamond", OKABE_ITO["purple"]),
    ]
    if chosen.needles:
        lines.append(("needles", np.array(chosen.needles), "star", ink(dark)))
    lost = set(chosen.needles_lost)
    # Without any marks there would be no lines to say so.
    data.append({"type": "scatter", "x": [None], "y": [None], "yaxis": "y2", "showlegend": False})
    for row, (name, cells, symbol, colour) in enumerate(lines):
        if len(cells):
            data.append(_marks(row, name, np.asarray(cells), symbol, colour, middle, span, lost))
    # The most that a span has, of either list.
    most = max(float((np.add.reduceat(flags, first) / length).max()) for flags in (listed, expected)) or 1.0
    names = [f"{len(cells)} {name}" for name, cells, *_ in lines]
    lower, upper = domains(0.085 * len(lines), 1 - 0.085 * len(lines), gap=0.06)
    across = {"range": [-0.5 - n_kv * 0.01, n_kv * 1.01 - 0.5], "showgrid": False, "anchor": "y2"}
    of = "" if span == 1 else f" (bars: of {span} cells each)"
    return figure(
        data,
        f"{title} · {_counted(chosen)}",
        dark,
        height=290,
        margin={"l": 92},
        barmode="relative",
        bargap=0,
        xaxis={**across, "tickformat": "d", "title": {"text": f"cell (of 0 to {n_kv - 1}){of}"}},
        yaxis={
            "domain": upper, "range": [-1.08 * most, 1.08 * most],
            "tickvals": [part * most for part in (-1, -0.5, 0, 0.5, 1)],
            "ticktext": [f"{most:.0%}", "<b>reference</b>", "none", "<b>kernel</b>", f"{most:.0%}"],
            "zeroline": True, "zerolinecolor": ink(dark),
        },
        yaxis2={
            "domain": lower, "range": [len(lines) - 0.4, -0.6], "tickvals": list(range(len(lines))),
            "ticktext": names, "zeroline": False,
        },
        annotations=[]
        if known
        else [centred("not listed yet" if chosen.kernel_ids is None else "no order", 0.5, 0.85, dark)],
    )  # fmt: skip


def _seen(ids: np.ndarray | None, n_kv: int) -> np.ndarray:
    """Which cells are listed: bool [n_kv]."""
    found = np.zeros(n_kv, bool)
    if ids is not None:
        found[ids[(ids >= 0) & (ids < n_kv)]] = True
    return found


def _marks(
    row: int,
    name: str,
    cells: np.ndarray,
    symbol: str,
    colour: str,
    middle: np.ndarray,
    span: int,
    lost: set[int],
) -> dict[str, Any]:
    """Marks in a line of their own: one for each cell, or, of many, for each span that has some."""
    each = len(cells) <= SPANS
    groups = [cells[i : i + 1] for i in range(len(cells))] if each else _by_span(cells, span)
    texts = [_listed(group) for group in groups]
    hollow = name == "needles" and bool(lost)
    symbols = [f"{symbol}-open" if int(g[0]) in lost else symbol for g in groups] if hollow else symbol
    if hollow:
        texts = [f"{t}, lost" if int(g[0]) in lost else t for t, g in zip(texts, groups, strict=True)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": cells if each else [middle[g[0] // span] for g in groups],
        "y": np.full(len(groups), row),
        "yaxis": "y2",
        "text": np.array(texts, object),
        "hovertemplate": f"{name}: %{{text}}<extra></extra>",
        "marker": {"symbol": symbols, "color": colour, "size": 9, "line": {"width": 1}},
        "showlegend": False,
    }


def _by_span(cells: np.ndarray, span: int) -> list[np.ndarray]:
    return np.split(cells, np.flatnonzero(np.diff(cells // span)) + 1)


def _listed(cells: Sequence[int] | np.ndarray) -> str:
    more = f" and {len(cells) - TOLD} more" if len(cells) > TOLD else ""
    return f"cell{'' if len(cells) == 1 else 's'} {', '.join(str(int(c)) for c in cells[:TOLD])}{more}"


def _counted(chosen: Chosen) -> str:
    if chosen.kernel_ids is None:
        return f"{len(chosen.selection.ids)} of {chosen.n_kv} by the reference" if chosen.selection else ""
    told = f"{len(chosen.kernel_ids)} of {chosen.n_kv} listed"
    if chosen.selection is None:
        return f"{told}, but the scores have no order"
    stray = f", {len(chosen.strays)} numbers that are no cells" if len(chosen.strays) else ""
    return f"{told}, {len(chosen.hits)} hits" + stray
