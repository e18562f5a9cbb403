"""What a row attends to: each column's share, and how the whole is split between the four parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..o1.readings import PARTS, Weights
from .style import OKABE_ITO, around_zero, centred, domains, extent, figure, heading, ink, note

__all__ = ["attention_split", "attention_weights"]

# Purple as Okabe and Ito have it comes too near to green for deuteranopes.
_SINKS = "#9B3F75"
COLOURS = (_SINKS, *(OKABE_ITO[name] for name in ("blue", "green", "orange")))
DARK_COLOURS = (_SINKS, *(OKABE_ITO[name] for name in ("sky", "green", "orange")))
ROWS = 96  # that the split shows, at most
FAR = len(PARTS) - 1

_NOT_YET = "The kernels have not written these weights yet."


def attention_weights(weights: Weights, *, dark: bool = False) -> go.Figure:
    """How a row's attention is shared out, by one query head: a bar for each column that the row sees, in the
    order of the kernels' scores: sinks, then its window from the oldest token to itself.

    Bars are what the kernels wrote, coloured by part; the dash across each is what the reference says: all is
    right where the dashes sit on the tops of the bars. On the right, with an axis of its own, is the share of
    the far field, which stands for every token that has left the window. Below is kernel minus reference,
    for all of them. Hover names the token and its slot.
    """
    kernel, reference = (np.asarray(x, float) for x in (weights.kernel, weights.reference))
    title = f"Row {weights.row}, head {weights.head}: share of the attention by column"
    if not np.isfinite(reference).any() and not np.isfinite(kernel).any():
        return note(title, _NOT_YET, dark)
    colours = DARK_COLOURS if dark else COLOURS
    parts, words = np.asarray(weights.parts), np.array(weights.columns, object)
    off = kernel - reference
    told = np.stack([kernel, reference, off], -1)
    near, far = np.flatnonzero(parts != FAR), np.flatnonzero(parts == FAR)

    def of(columns: np.ndarray, y: np.ndarray, axes: str, **more: Any) -> dict[str, Any]:
        """A trace over some of the columns, on the axes x and y so numbered."""
        x_axis, y_axis = (f"{name}{number.strip('1')}" for name, number in zip("xy", axes, strict=True))
        here = {"x": columns, "y": y[columns], "customdata": told[columns], "hovertext": words[columns]}
        return here | {"hovertemplate": _HOVER, "xaxis": x_axis, "yaxis": y_axis} | more

    data = []
    for part, (name, colour) in enumerate(zip(PARTS, colours, strict=True)):
        bar = {"type": "bar", "name": name, "marker": {"color": colour}, "width": _BAR}
        data.append(of(np.flatnonzero(parts == part), kernel, "23" if part == FAR else "11", **bar))
    size = float(np.clip(560 / max(len(near), 1), 3, 18))
    for columns, axes, wide in ((near, "11", size), (far, "23", 40)):
        dash = {"symbol": "line-ew-open", "size": wide, "color": ink(dark), "line": {"width": 1.6}}
        mark = {"type": "scatter", "mode": "markers", "name": "reference", "showlegend": columns is near}
        data.append(of(columns, reference, axes, **mark, marker=dash))
    for columns, axes in ((near, "12"), (far, "22")):
        bar = {"type": "bar", "name": "difference", "showlegend": False, "width": _BAR}
        data.append(of(columns, off, axes, **bar, marker={"color": [colours[p] for p in parts[columns]]}))
    across, (lower, upper) = domains(0.9, 0.1, gap=0.05), domains(0.27, 0.73, gap=0.09)
    return figure(
        data,
        title,
        dark,
        height=320,
        margin={"t": 58, "r": 54, "l": 68},
        barmode="overlay",
        xaxis={
            "domain": across[0], "anchor": "y2", "range": [-0.7, len(near) - 0.3], "showgrid": False,
            "title": {"text": "column: sinks, then the window from its oldest token"},
        },
        xaxis2={
            "domain": across[1], "anchor": "y2", "tickvals": far, "ticktext": ["far field"],
            "showgrid": False,
        },
        yaxis={
            "domain": upper, "range": [0, extent(kernel[near], reference[near]) * 1.08],
            "title": {"text": "share"},
        },
        yaxis2={
            "domain": lower, "title": {"text": "difference"}, "zeroline": True, "zerolinecolor": ink(dark),
            **around_zero(off),
        },
        yaxis3={
            "domain": upper, "range": [0, 1], "anchor": "x2", "side": "right", "title": {"text": "far share"},
        },
        annotations=[] if np.isfinite(kernel).any() else [centred(_NOT_YET, 0.4, 0.75, dark)],
    )  # fmt: skip


_BAR = 0.86  # of the width of a column
_HOVER = (
    "<b>%{hovertext}</b><br>kernel %{customdata[0]:.7g}<br>reference %{customdata[1]:.7g}"
    "<br>difference %{customdata[2]:.2e}<extra>column %{x}</extra>"
)


def attention_split(weights: Weights | Sequence[Weights], *, dark: bool = False) -> go.Figure:
    """How attention is split between sinks, window, own chunk and far field: by the kernels, beside it by the
    reference, and their difference.

    Of one row: two bars of length 1 below each other, with the shares in them. Of several rows of one head:
    a column for each row, in which the four shares are stacked, and on the right a line for the difference
    of each part. The far share grows as tokens leave the window.
    """
    every = [weights] if not isinstance(weights, Sequence) else list(weights)
    if not every:
        return note("Split of the attention", "There are no rows.", dark)
    every_nth = -(-len(every) // ROWS)
    shown = every[::every_nth]
    kernel, reference = (np.array([w.split(who) for w in shown], float) for who in ("kernel", "reference"))
    if len(shown) == 1:
        return _split_of_one(shown[0], kernel[0], reference[0], dark)
    rows = np.array([w.row for w in shown])
    left, middle, right = domains(1, 1, 0.85, gap=(0.03, 0.115))
    data: list[dict[str, Any]] = []
    off = kernel - reference
    colours = DARK_COLOURS if dark else COLOURS
    told = np.stack([kernel, reference, off], -1)  # [rows][parts][3]
    for part, (name, colour) in enumerate(zip(PARTS, colours, strict=True)):
        hover = {
            "x": rows,
            "name": name,
            "legendgroup": name,
            "customdata": told[:, part],
            "hovertemplate": f"row %{{x}}, <b>{name}</b><br>kernel %{{customdata[0]:.7g}}<br>"
            "reference %{customdata[1]:.7g}<br>difference %{customdata[2]:.2e}<extra></extra>",
        }
        bar = {**hover, "type": "bar", "marker": {"color": colour}, "width": every_nth}
        line = {"color": colour, "dash": _DASHES[part], "width": 1.6}
        marker = {"symbol": _SYMBOLS[part], "size": 5, "color": colour}
        data += [
            {**bar, "y": kernel[:, part]},
            {**bar, "y": reference[:, part], "xaxis": "x2", "showlegend": False},
            {
                **hover,
                "type": "scatter",
                "mode": "lines+markers" if len(rows) <= 32 else "lines",
                "y": off[:, part],
                "xaxis": "x3",
                "yaxis": "y2",
                "line": line,
                "marker": marker,
                "showlegend": False,
            },
        ]
    row = "row" if every_nth == 1 else f"row (every {every_nth}.)"
    span = [float(rows.min()) - every_nth / 2, float(rows.max()) + every_nth / 2]
    axis = {"title": {"text": row}, "range": span, "showgrid": False}
    reach = extent(off) * 1.15
    heads = {w.head for w in every}
    of = f"head {every[0].head}" if len(heads) == 1 else "several heads"
    notes = [
        heading(t, d)
        for t, d in zip(("kernel", "reference", "kernel − reference"), (left, middle, right), strict=True)
    ]
    if not np.isfinite(kernel).any():
        notes.append(centred("not written yet", sum(left) / 2, 0.5, dark))
    return figure(
        data,
        f"Split of the attention, {of}",
        dark,
        height=280,
        margin={"t": 76},
        legend={"traceorder": "normal"},
        barmode="stack",
        bargap=0,
        xaxis={**axis, "domain": left},
        xaxis2={**axis, "domain": middle, "anchor": "y", "matches": "x"},
        xaxis3={**axis, "domain": right, "anchor": "y2", "matches": "x"},
        yaxis={"range": [0, 1], "title": {"text": "share of the attention"}},
        yaxis2={
            "anchor": "x3", "range": [-reach, reach], "zeroline": True, "zerolinecolor": ink(dark),
            "nticks": 6,
        },
        annotations=notes,
    )  # fmt: skip


_DASHES = ("dot", "dash", "solid", "dashdot")
_SYMBOLS = ("square", "diamond", "circle", "triangle-up")


def _split_of_one(weights: Weights, kernel: np.ndarray, reference: np.ndarray, dark: bool) -> go.Figure:
    colours = DARK_COLOURS if dark else COLOURS
    data = []
    for part, (name, colour) in enumerate(zip(PARTS, colours, strict=True)):
        both = np.array([reference[part], kernel[part]])
        told = [kernel[part], reference[part], kernel[part] - reference[part]]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": name,
                "y": ["reference", "kernel"],
                "x": both,
                "marker": {"color": colour},
                "text": [f"{name} {share:.1%}" if share > 0.1 else "" for share in both.tolist()],
                "textposition": "inside",
                "insidetextanchor": "middle",
                "textangle": 0,
                "constraintext": "none",
                "textfont": {"color": "#ffffff" if part == 0 or (part == 1 and not dark) else "#000000"},
                "customdata": [told, told],
                "hovertemplate": f"<b>{name}</b><br>kernel %{{customdata[0]:.7g}}<br>"
                "reference %{customdata[1]:.7g}<br>difference %{customdata[2]:.2e}<extra></extra>",
            }
        )
    return figure(
        data,
        f"Row {weights.row}, head {weights.head}: split of the attention",
        dark,
        height=190,
        margin={"t": 60, "l": 76},
        legend={"traceorder": "normal"},
        barmode="stack",
        bargap=0.25,
        xaxis={"range": [0, 1], "title": {"text": "share of the attention"}},
        yaxis={"showgrid": False},
        annotations=[] if np.isfinite(kernel).all() else [centred(_NOT_YET, 0.5, 0.75, dark)],
    )
