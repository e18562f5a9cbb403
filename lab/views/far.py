"""The far field: what landmarks bring to a row, what they hold, and how near it comes to exact attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..o1.data import ApproximationError
from ..o1.readings import Gains, Masses
from .style import (
    OKABE_ITO,
    REFERENCE,
    centred,
    diverging,
    domains,
    extent,
    figure,
    for_marks,
    heading,
    ink,
    kernel_colour,
    note,
    pooled,
    sequence,
)

__all__ = ["approximation", "approximation_over_rows", "far_gains", "masses"]

STEPS = 64  # of masses that are drawn, at most
POINTS = 1000  # of a line, at most
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star", "hexagon")


def far_gains(gains: Gains, *, dark: bool = False) -> go.Figure:
    """What each landmark brings to each row of a chunk, as a share of the row's mass, by one query head.

    A line of cells for each row and a column for each landmark: by the kernels, by the reference (on the same
    colour scale, the brighter the more), and their difference, blue where the kernel has too little and red
    where it has too much. On the right is the far share of every row as a whole: the line is the kernels',
    the diamonds are the reference's. Places without colour have no gain yet: nothing has left the window up
    to that row, or no kernel has written it.
    """
    kernel, reference = (np.asarray(x, float) for x in (gains.kernel, gains.reference))
    title = f"Head {gains.head}: what landmarks bring, as a share of the row's mass"
    if not kernel.size or not (np.isfinite(kernel).any() or np.isfinite(reference).any()):
        return note(title, "No gains: nothing has left the window up to these rows.", dark)
    rows = gains.first + np.arange(len(kernel))
    landmarks = np.arange(kernel.shape[1])
    off = kernel - reference
    told = np.stack([kernel, reference, off], -1).astype(np.float32)
    hover = (
        "row %{y}, landmark %{x}<br>kernel %{customdata[0]:.6g}<br>reference %{customdata[1]:.6g}"
        "<br>difference %{customdata[2]:.2e}<extra></extra>"
    )
    maps = [
        {
            "type": "heatmap", "x": landmarks, "y": rows, "z": values.astype(np.float32), "customdata": told,
            "hovertemplate": hover, "coloraxis": f"coloraxis{'2' if n == 3 else ''}", "xgap": 0.5,
            "ygap": 0.5, **_axes(n, n),
        }
        for n, values in enumerate((kernel, reference, off), 1)
    ]  # fmt: skip
    first, second, third, right = places = domains(1, 1, 1, 0.7, gap=(0.02, 0.105, 0.105))
    shares = [np.asarray(x, float) for x in (gains.far_share_kernel, gains.far_share_reference)]
    share_hover = "row %{y}<br>far share %{x:.7g}<extra>%{fullData.name}</extra>"
    lines = [
        {
            "type": "scatter", "name": name, "x": share, "y": rows, "hovertemplate": share_hover, **look,
            "xaxis": "x4", "yaxis": "y4", "showlegend": False,
        }
        for name, share, look in zip(
            ("kernel", "reference"), shares, (_line(kernel_colour(dark)), _diamonds(7)), strict=True
        )
    ]  # fmt: skip
    size = extent(kernel, reference)
    negative = min(np.nanmin(kernel, initial=0), np.nanmin(reference, initial=0)) < 0
    reach = extent(off)
    landmark = {"title": {"text": "landmark"}, "showgrid": False, "dtick": _whole(len(landmarks))}
    row = {"range": [rows[-1] + 0.5, rows[0] - 0.5], "showgrid": False}
    bars = [
        {"x": place[1], "xanchor": "left", "y": 0.5, "len": 1, "lenmode": "fraction", "nticks": 6}
        for place in (second, third)
    ]
    headings = ("kernel", "reference", "kernel − reference", "far share of the row")
    notes = [heading(text, place) for text, place in zip(headings, places, strict=True)]
    if not np.isfinite(kernel).any():
        notes.append(centred("not written yet", sum(first) / 2, 0.5, dark))
    return figure(
        [*maps, *lines],
        title,
        dark,
        height=int(np.clip(130 + 12 * len(rows), 240, 340)),
        margin={"t": 56},
        coloraxis={
            "colorscale": diverging(dark) if negative else sequence(),
            "cmin": -size if negative else 0,
            "cmax": size,
            "colorbar": bars[0],
        },
        coloraxis2={"colorscale": diverging(dark), "cmin": -reach, "cmax": reach, "colorbar": bars[1]},
        xaxis={**landmark, "domain": first},
        xaxis2={**landmark, "domain": second, "anchor": "y2"},
        xaxis3={**landmark, "domain": third, "anchor": "y3"},
        xaxis4={"domain": right, "anchor": "y4", "rangemode": "tozero", "nticks": 4},
        yaxis={**row, "title": {"text": "row"}},
        yaxis2={**row, "anchor": "x2", "showticklabels": False, "matches": "y"},
        yaxis3={**row, "anchor": "x3", "showticklabels": False, "matches": "y"},
        yaxis4={**row, "anchor": "x4", "showticklabels": False, "matches": "y"},
        annotations=notes,
    )


def _axes(x: int, y: int) -> dict[str, str]:
    return {"xaxis": f"x{x if x > 1 else ''}", "yaxis": f"y{y if y > 1 else ''}"}


def _line(colour: str) -> dict[str, Any]:
    return {
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2},
        "marker": {"color": colour, "size": 4},
    }


def _whole(count: int) -> int:
    """The distance of ticks that count so many: whole numbers."""
    return max(1, -(-count // 6))


def _diamonds(size: int, colour: Any = REFERENCE) -> dict[str, Any]:
    return {"mode": "markers", "marker": {"symbol": "diamond-open", "size": size, "color": colour}}


# ---- maxima and masses ---------------------------------------------------------------------------------


def masses(masses: Masses, *, dark: bool = False) -> go.Figure:
    """How the landmarks of a head fill as tokens leave the window, chunk after chunk.

    On the left is the running maximum M of each landmark: the largest exponent that any evicted token had
    with it; it never falls. In the middle is its mass z, the sum of the exponentials relative to M: it grows
    with each evicted token, and falls where M rises. Points are the kernels', in colours from the first
    landmark (dark) to the last (bright), with a line through those of each landmark; diamonds around them are
    the reference's. On the right is kernel minus reference, as a share of the largest M or z. Where nothing
    has been evicted yet there is nothing to see.
    """
    every_nth = max(1, -(-len(masses.rows) // STEPS))
    shown = slice((len(masses.rows) - 1) % every_nth, None, every_nth)  # the last is among them
    tokens = np.asarray(masses.rows)[shown]
    pairs = [
        tuple(_finite(np.asarray(x, float)[shown]) for x in pair)
        for pair in ((masses.maxima, masses.reference_maxima), (masses.masses, masses.reference_masses))
    ]
    # Masses are 0 where maxima are -infinity.
    pairs[1] = tuple(np.where(np.isnan(m), np.nan, z) for m, z in zip(*pairs, strict=True))
    title = f"Head {masses.head}: running maxima and masses of the landmarks"
    if not any(np.isfinite(x).any() for pair in pairs for x in pair):
        return note(title, "Nothing has left the window yet: landmarks hold nothing.", dark)
    count = pairs[0][0].shape[1]
    x, landmarks = np.repeat(tokens, count), np.tile(np.arange(count), len(tokens))
    colour = {"color": landmarks, "coloraxis": "coloraxis"}
    # In the legend, points on a colour scale would be of no colour.
    data: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "markers", "name": name, "x": [None], "y": [None], "marker": marker}
        for name, marker in (
            ("kernel", {"color": ink(dark), "size": 4.5}),
            ("reference", {"color": ink(dark), "size": 8, "symbol": "diamond-open"}),
        )
    ]
    for number, (kernel, reference) in enumerate(pairs, 1):
        axes, letter = _axes(number, number), "Mz"[number - 1]
        hover = (
            f"after token %{{x}}, landmark %{{customdata}}<br>{letter} %{{y:.7g}}"
            "<extra>%{fullData.name}</extra>"
        )
        points = {"type": "scatter", "x": x, "customdata": landmarks, "hovertemplate": hover, **axes}
        broken = np.full((count, len(tokens) + 1), np.nan)  # a gap after each landmark
        broken[:, :-1] = kernel.T
        data += [
            {
                "type": "scatter", "mode": "lines", "x": np.tile(np.append(tokens, tokens[-1]), count),
                "y": broken.ravel(), "line": {"width": 0.7, "color": _THREAD[dark]}, "hoverinfo": "skip",
                "showlegend": False, **axes,
            },
            {
                **points, "name": "kernel", "y": kernel.ravel(), "mode": "markers",
                "marker": {**colour, "size": 4.5}, "showlegend": False,
            },
            {
                **points, "name": "reference", "y": reference.ravel(), "mode": "markers",
                "marker": {**colour, "symbol": "diamond-open", "size": 8}, "showlegend": False,
            },
        ]  # fmt: skip
        off = (kernel - reference) / extent(reference)
        data.append(
            {
                **points, **_axes(3, 3), "name": letter, "y": off.ravel(), "mode": "markers",
                "marker": {
                    "symbol": ("circle-open", "x")[number - 1], "size": 4.5,
                    "color": OKABE_ITO[("purple", "green")[number - 1]],
                },
            }
        )  # fmt: skip
    places = domains(1, 1, 0.9, gap=(0.06, 0.17))
    token = {"title": {"text": "tokens pushed"}, "nticks": 6}
    headings = ("maximum M", "mass z, relative to M", "kernel − reference")
    return figure(
        data,
        title,
        dark,
        height=290,
        margin={"t": 76},
        coloraxis={
            "colorscale": for_marks(dark), "cmin": 0, "cmax": max(count - 1, 1),
            "colorbar": {
                "title": {"text": "landmark", "side": "right"}, "x": places[1][1], "dtick": _whole(count),
            },
        },
        xaxis={**token, "domain": places[0]},
        xaxis2={**token, "domain": places[1], "anchor": "y2", "matches": "x"},
        xaxis3={**token, "domain": places[2], "anchor": "y3", "matches": "x"},
        yaxis={},
        yaxis2={"anchor": "x2", "rangemode": "tozero"},
        yaxis3={
            "anchor": "x3", "zeroline": True, "zerolinecolor": ink(dark),
            "title": {"text": "share of the largest"},
        },
        annotations=[heading(text, place) for text, place in zip(headings, places, strict=True)],
    )  # fmt: skip


_THREAD = ("#b6bbc1", "#5c6166")


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


# ---- how near to exact attention -----------------------------------------------------------------------


def approximation(errors: Sequence[ApproximationError], *, dark: bool = False) -> go.Figure:
    """How far the system is from softmax attention over all tokens, by window and number of landmarks.

    A line for each window: the relative error of the output over the number of landmarks, on a logarithmic
    axis. 0 landmarks stand for sinks and window alone, without a far field: where a line falls from there,
    the far field brings something. ``errors`` is what ``lab.o1.data.approximation_errors`` gives.
    """
    title = "Distance from exact attention"
    if not errors:
        return note(title, "There are no errors to show.", dark)
    counts = sorted({e.landmarks for e in errors})
    place = {landmarks: i for i, landmarks in enumerate(counts)}
    names = ("blue", "orange", "green", "vermillion", "purple", "sky", "grey")
    data = []
    for number, window in enumerate(sorted({e.window for e in errors})):
        mine = sorted((e for e in errors if e.window == window), key=lambda e: e.landmarks)
        colour = OKABE_ITO[names[number % len(names)]]
        colour = kernel_colour(dark) if colour == OKABE_ITO["blue"] else colour
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers+text",
                "name": f"window {window}",
                "x": [place[e.landmarks] for e in mine],
                "y": [e.error for e in mine],
                "customdata": [e.landmarks for e in mine],
                "text": [""] * (len(mine) - 1) + [f"  window {window}"],
                "textposition": "middle right",
                "textfont": {"color": colour},
                "cliponaxis": False,
                "line": {"color": colour, "width": 2},
                "marker": {"symbol": _SYMBOLS[number % len(_SYMBOLS)], "size": 9},
                "hovertemplate": f"window {window}, %{{customdata}} landmarks"
                "<br>|o1 − full| / |full| = %{y:.4g}<extra></extra>",
            }
        )
    return figure(
        data,
        title,
        dark,
        height=280,
        margin={"r": 110},
        showlegend=False,
        xaxis={
            "title": {"text": "landmarks (0: no far field)"},
            "tickvals": list(range(len(counts))),
            "ticktext": list(map(str, counts)),
        },
        yaxis={"title": {"text": "|o1 − full| / |full|"}, "type": "log", **_AT},
    )


_TICKS = [digit * 10.0**power for power in range(-9, 4) for digit in (1, 2, 5)]
_AT = {"tickvals": _TICKS, "ticktext": [f"{tick:g}" for tick in _TICKS]}


def approximation_over_rows(
    errors: Any, *, first: int = 0, window: int | None = None, dark: bool = False
) -> go.Figure:
    """How far each row's output is from softmax attention over all tokens.

    The line is the median over the query heads, the band goes from the best head to the worst. As long as all
    tokens are in the window the system is exact, but for rounding; the error sets in where the dashed line
    stands, at the first row that evicts a token. ``errors`` is [rows][heads], |o1 - full| / |full| of each
    row's output; ``first`` is the number of the first row, ``window`` the window that is marked.
    """
    values = np.asarray(errors, float)
    values = values.reshape(len(values), -1)
    title = "Distance from exact attention along the sequence"
    if not values.size:
        return note(title, "There are no rows.", dark)
    with np.errstate(all="ignore"):
        lowest, middle, highest = (f(values, axis=1) for f in (np.min, np.median, np.max))
    small = pooled(middle[None], (1, POINTS))
    at = small.columns[0]
    rows = first + at
    band = [_positive(x[at]) for x in (lowest, highest)]
    colour = kernel_colour(dark)
    told = np.stack([lowest[at], middle[at], highest[at], values[at].argmax(1)], -1)
    hover = (
        "row %{x}<br>median %{customdata[1]:.3g}<br>heads from %{customdata[0]:.3g} to %{customdata[2]:.3g}"
        "<br>worst head %{customdata[3]:d}<extra></extra>"
    )
    edge = {"type": "scatter", "mode": "lines", "x": rows, "line": {"width": 0}, "hoverinfo": "skip"}
    shade = "rgba(86,180,233,.25)"
    data = [
        {**edge, "y": band[0], "showlegend": False},
        {**edge, "y": band[1], "fill": "tonexty", "fillcolor": shade, "name": "best to worst head"},
        {
            "type": "scatter",
            "mode": "lines",
            "name": "median",
            "x": rows,
            "y": _positive(middle[at]),
            "line": {"color": colour, "width": 2},
            "customdata": told,
            "hovertemplate": hover,
        },
    ]
    marks: dict[str, Any] = {}
    if window is not None and first <= window <= first + len(values) - 1:
        line = {"color": ink(dark), "width": 1, "dash": "dash"}
        place = {"x0": window, "x1": window, "y0": 0, "y1": 1, "yref": "paper"}
        text = {"x": window, "y": 1, "yref": "paper", "yanchor": "bottom", "text": "first eviction"}
        marks = {"shapes": [{"type": "line", "line": line, **place}], "annotations": [text]}
    return figure(
        data,
        title,
        dark,
        height=280,
        margin={"t": 72},
        xaxis={"title": {"text": small.title(1, "row")}},
        yaxis={"title": {"text": "|o1 − full| / |full|"}, "type": "log"},
        **marks,
    )


def _positive(values: np.ndarray) -> np.ndarray:
    """For logarithmic axes: what is not above zero is left out."""
    return np.where(values > 0, values, np.nan)
