"""When each dispatch of a trace ran and for how long."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..systems.trace import Step, Trace
from .markup import is_off, short
from .style import OKABE_ITO, behind, figure, ink, kernel_colour, note

__all__ = ["timeline"]

DISPATCHES = 2000  # that are drawn, at most
_LEAST = 1 / 500  # of the whole width: what is shorter could not be seen


def timeline(trace: Trace, *, compare: bool = True, dark: bool = False) -> go.Figure:
    """Every dispatch of a trace, in the order and for the time that it ran.

    A line for each kernel, in the order of the plan, with the time that it took altogether; a bar for each of
    its dispatches, as long as it took. Replaced kernels are orange and have a pencil (✎). Dispatches that
    deviate from the reference by more than rounding explains, or did not come to their end, have a cross, the
    first one its number. Thin lines part the chunks. Times are those of recording, with memory guards: good
    for what is slow, not for how fast it can be.

    Without ``compare`` only deviations that are known already are marked; finding them takes longer than all
    else. Of traces longer than 2000 dispatches the last ones are shown.
    """
    steps: list[Step] = list(trace[-DISPATCHES:])
    if not steps:
        return note("Timeline", "Nothing has run yet.", dark)
    ms = np.array([step.seconds for step in steps]) * 1e3
    starts = np.cumsum(ms) - ms
    whole = float(ms.sum()) or 1.0
    ends = np.maximum(starts + ms, starts + _LEAST * whole)
    kernels = list(dict.fromkeys(step.kernel for step in steps))
    rows = np.array([kernels.index(step.kernel) for step in steps])
    off = np.array([_is_off(step, compare) for step in steps])
    replaced = np.array([step.replaced for step in steps])
    told = np.array([[s.number, t, s.chunk] for s, t in zip(steps, ms.tolist(), strict=True)])
    texts = np.array([_words(step) for step in steps], object)

    data: list[dict[str, Any]] = [_chunks(steps, starts, len(kernels), dark)]
    for name, mine, colour in (
        ("shipped", ~replaced, kernel_colour(dark)),
        ("✎ replaced", replaced, OKABE_ITO["orange"]),
    ):
        if mine.any():
            data.append(_bars(name, starts[mine], ends[mine], rows[mine], told[mine], texts[mine], colour))
    notes: list[dict[str, Any]] = []
    if off.any():
        middle = (starts + ends)[off] / 2
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "✗ deviates",
                "x": middle,
                "y": rows[off],
                "customdata": told[off],
                "hovertext": texts[off],
                "hovertemplate": _HOVER,
                "marker": {
                    "symbol": "x", "size": 9, "color": OKABE_ITO["vermillion"],
                    "line": {"width": 1, "color": ink(dark)},
                },
            }
        )  # fmt: skip
        first = int(np.flatnonzero(off)[0])
        late = bool(middle[0] > 0.6 * whole)
        low = bool(rows[first] > len(kernels) / 2)
        name = short(kernels[rows[first]], trace.system)
        notes.append(
            {
                "text": f"<b>✗ first: dispatch {steps[first].number}, {name}</b>",
                "x": float(middle[0]),
                "y": int(rows[first]),
                "showarrow": True,
                "arrowhead": 2,
                "arrowcolor": OKABE_ITO["vermillion"],
                "ax": -30 if late else 30,
                "ay": -34 if low else 34,
                "xanchor": "right" if late else "left",
                "bgcolor": behind(dark),
                "font": {"color": ink(dark), "size": 12},
            }
        )
    totals = np.bincount(rows, ms, len(kernels))
    labels = [
        f"{short(name, trace.system)}  <b>{_time(t)}</b>" for name, t in zip(kernels, totals, strict=True)
    ]
    earlier = f", the last {len(steps)}" if len(steps) < len(trace) else ""
    found = f", {int(off.sum())} deviate" if off.any() else ""
    return figure(
        data,
        f"{len(trace)} dispatches{earlier} in {_time(whole)}{found}",
        dark,
        height=int(np.clip(104 + 19 * len(kernels), 190, 340)),
        margin={"l": 148, "t": 62},
        annotations=notes,
        xaxis={"range": [-0.005 * whole, 1.01 * whole], "title": {"text": "time, ms"}, "showgrid": False},
        yaxis={
            "range": [len(kernels) - 0.4, -0.6], "tickvals": list(range(len(kernels))), "ticktext": labels,
            "ticks": "",
        },
    )  # fmt: skip


_HOVER = (
    "dispatch %{customdata[0]:d}, %{hovertext}<br>%{customdata[1]:.3f} ms"
    "<extra>chunk %{customdata[2]:d}</extra>"
)


def _is_off(step: Step, compare: bool) -> bool:
    if compare and not step.fault:
        return any(d.exceeds for d in step.deviations)
    return is_off(step)


def _words(step: Step) -> str:
    plan = step.plan
    last = plan.first + plan.rows - 1
    rows = f"row {plan.first}" if plan.rows == 1 else f"rows {plan.first} to {last}"
    return f"{step.kernel}<br>{plan.path}, {rows}, writes {' '.join(step.dispatch.writes)}"


def _bars(
    name: str,
    starts: np.ndarray,
    ends: np.ndarray,
    rows: np.ndarray,
    told: np.ndarray,
    texts: np.ndarray,
    colour: str,
) -> dict[str, Any]:
    """All bars as one broken line, which a browser draws in no time: start, middle, end, gap."""
    x = np.stack([starts, (starts + ends) / 2, ends, np.full(len(starts), np.nan)], -1)
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x.ravel(),
        "y": np.repeat(rows, 4),
        "customdata": np.repeat(told, 4, axis=0),
        "hovertext": np.repeat(texts, 4),
        "hovertemplate": _HOVER,
        "line": {"width": 11, "color": colour},
    }


def _chunks(steps: list[Step], starts: np.ndarray, kernels: int, dark: bool) -> dict[str, Any]:
    """A thin line before each chunk."""
    numbers = np.array([step.chunk for step in steps])
    at = starts[np.flatnonzero(np.diff(numbers, prepend=-1))]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": np.stack([at, at, np.full(len(at), np.nan)], -1).ravel(),
        "y": np.tile([-0.6, kernels - 0.4, np.nan], len(at)),
        "line": {"width": 1, "color": "#34383d" if dark else "#e4e6e9"},
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _time(ms: float) -> str:
    return f"{ms * 1e3:.0f} µs" if ms < 1 else f"{ms:.1f} ms" if ms < 1000 else f"{ms / 1000:.2f} s"
