"""How far a buffer is from what it should hold: maps of the distance, and the worst elements in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..errors import ArgumentError
from ..systems.deviation import Distances, Expectation, Expected, elements_of, severity
from ..systems.plan import Field
from ..systems.trace import Step
from .style import CELLS, OKABE_ITO, Pooled, figure, ground, ink, note, pooled, sequence

__all__ = ["MODES", "error", "of_step", "worst_elements"]

MODES = ("relative", "absolute", "ulp")
MARKED = 40  # elements beyond rounding that are marked, at most
_DECADES = 8  # that the colours of relative and absolute distances span
_MOST_ULP = 2.0**32
_LEAST_ROWS = 8  # of a map, where the terms allow
_LEAST = 2.0**-126  # below it float32 is denormal

Terms = Sequence[tuple[str, int]]


@dataclass(frozen=True)
class _Map:
    """What is drawn: arrays [rows][columns], and the terms that count rows and columns.

    ``distance`` is NaN where nothing is expected, infinite where no number is off by infinitely much.
    ``beyond`` is where it is more than rounding explains. ``start`` is the number of the first row.
    """

    value: np.ndarray
    expected: np.ndarray
    distance: np.ndarray
    beyond: np.ndarray
    row_terms: Terms
    column_terms: Terms
    start: int = 0


def error(
    value: np.ndarray,
    expected: np.ndarray,
    defined: np.ndarray | None = None,
    *,
    mode: str = "relative",
    title: str = "Distance from the expected values",
    rows: str = "row",
    columns: str = "column",
    dark: bool = False,
) -> go.Figure:
    """How far each element of an array is from what it should be: a map, the brighter the further.

    Colours are logarithmic and mean the same in every such map: with ``mode`` "relative" the distance as a
    share of the largest expected value, from 1e-8 (dark) to 1; with "absolute" the distance itself, over as
    many decades up to the largest expected value; with "ulp" the distance in units in the last place of
    float32, from 1. So noise of rounding stays dark and a bug is bright. What is exact is as dark as can be,
    places where nothing is expected are grey, and a value that is no number, or infinite, is orange. An array
    that is too large is pooled: a cell shows the largest distance of those it stands for, and the axis says
    so.

    ``value`` and ``expected`` are [columns] or [rows][columns]; only ``defined`` (bool) elements count, by
    default all. Raises ArgumentError for another mode or shapes that do not fit.
    """
    got, want = np.asarray(value), np.asarray(expected)
    known = np.ones(got.shape, bool) if defined is None else np.asarray(defined, bool)
    if not got.shape == want.shape == known.shape or got.ndim not in (1, 2):
        shapes = f"{got.shape}, {want.shape} and {known.shape}"
        raise ArgumentError(f"value, expected and defined are of one shape, [rows][columns], not {shapes}.")
    shape = (1, got.size) if got.ndim == 1 else got.shape
    got, want, known = (x.reshape(shape) for x in (got, want, known))
    part = Field("", 0, shape[1], ((rows, shape[0]), (columns, shape[1])), math.inf)
    distances = Distances.of(got, Expected(want, known, np.zeros(shape)), part)
    drawn = _laid_out(distances, part, known.reshape(-1), known.reshape(-1), mode)
    return _figure(drawn, mode, _largest(want, known), title, dark)


def of_step(
    step: Step, buffer: str, field: str | None = None, *, mode: str = "relative", dark: bool = False
) -> go.Figure:
    """How far what a dispatch wrote into a buffer is from the reference: a map, the brighter the further.

    To be read as ``error``; here elements that are off by more than rounding explains are marked with a
    cross, the worst of them at least. Rows and columns count the elements by the buffer's own terms, which
    hover tells one by one, with value and expected value; rows at the ends that the dispatch left as they
    were, and rightly so, are cut away. Of a buffer with several fields (such as ``mz``: M and z) one is
    shown, ``field`` or the one that is off most.

    Raises ArgumentError for a buffer that the step does not have, another field or another mode.
    """
    _check(mode)
    got, about = step.value(buffer), step.plan.buffers[buffer]
    title = f"{buffer} after dispatch {step.number}, {step.kernel}"
    if step.fault:
        return note(title, f"The kernel did not come to its end: {step.fault}", dark)
    expected, fields = _expected(step, buffer)
    parts = [f for f in fields if expected is not None and elements_of(expected.defined, f).any()]
    if expected is None or not parts:
        return note(title, f"The reference says nothing of {buffer} after {step.kernel}.", dark)
    if field is not None:
        if field not in (names := [f.name for f in fields]):
            raise ArgumentError(f"{buffer} has no field '{field}': it has {', '.join(names)}.")
        parts = [f for f in parts if f.name == field]
        if not parts:
            return note(title, f"The reference says nothing of {field} of {buffer}.", dark)
    worst = max((d for d in step.deviations if d.buffer == buffer), key=severity, default=None)
    part = next((f for f in parts if worst is not None and f.name == worst.field), parts[0])
    distances = Distances.of(got, expected, part)
    defined = elements_of(expected.defined, part)
    beyond = int((distances.many > part.tolerance).sum())
    many = f"{beyond} of {int(defined.sum())} beyond rounding" if beyond else "all as expected"
    which = f"{part.name} of " if part.name else ""
    more = f" (of {len(about.fields)} fields the worst)" if field is None and len(parts) > 1 else ""
    changed = elements_of(step.changed(buffer), part)
    drawn = _laid_out(distances, part, defined, changed, mode)
    return _figure(drawn, mode, _largest(distances.want, defined), f"{which}{title}{more}: {many}", dark)


def worst_elements(step: Step, buffer: str, count: int = 10, *, dark: bool = False) -> go.Figure:
    """The elements of a buffer that are furthest from the reference after a dispatch, the worst first.

    Where each lies in the system's terms, its value and the one expected, how far it is off: the distance,
    as a share of the largest expected value, and in roundings beside those that are allowed. What is beyond
    them is marked with a cross. Raises ArgumentError for a buffer that the step does not have.
    """
    got = step.value(buffer)
    title = f"Worst elements of {buffer} after dispatch {step.number}, {step.kernel}"
    if step.fault:
        return note(title, f"The kernel did not come to its end: {step.fault}", dark)
    expected, fields = _expected(step, buffer)
    if expected is None:
        return note(title, f"The reference says nothing of {buffer} after {step.kernel}.", dark)
    lines: list[tuple[float, list[str]]] = []
    for part in fields:
        d = Distances.of(got, expected, part)
        for i in np.lexsort((-d.off, -d.many))[:count]:
            place = int(d.differing[i])
            beyond = not d.many[i] <= part.tolerance
            cells = [
                "✗" if beyond else "",
                part.name or buffer,
                _where(step, buffer, part, place),
                *(f"{x[place]:.9g}" for x in (d.got, d.want)),
                *(f"{x[i]:.2g}" for x in (d.off, d.share, d.many)),
                f"{part.tolerance:.3g}",
            ]
            lines.append((float(d.many[i]) / (part.tolerance or 1.0), cells))
    if not lines:
        return note(title, "Every element is exactly what the reference has.", dark)
    lines.sort(key=lambda line: -line[0])
    shown = [cells for _, cells in lines[:count]]
    heads = ("", "of", "where", "value", "expected", "off by", "share", "roundings", "allowed")
    widths = (0.3, 0.8, 4.0, 1.35, 1.35, 0.85, 0.85, 1.1, 0.9)
    sides = ["center", "left", "left", *["right"] * 6]
    colours = [[OKABE_ITO["vermillion"] if row[0] else ink(dark) for row in shown]] + [ink(dark)] * 8
    line = {"color": "#34383d" if dark else "#e4e6e9"}
    lines_of = (max(-(-len(row[2]) // 44), -(-len(row[1]) // 8)) for row in shown)
    height = sum(22 + 14 * (count - 1) for count in lines_of)
    table = {
        "type": "table",
        "columnwidth": widths,
        "header": {
            "values": [f"<b>{head}</b>" for head in heads],
            "align": sides,
            "height": 24,
            "fill": {"color": ground(dark)},
            "font": {"color": ink(dark), "size": 11},
            "line": line,
        },
        "cells": {
            "values": [list(column) for column in zip(*shown, strict=True)],
            "align": sides,
            "fill": {"color": "rgba(0,0,0,0)"},
            "font": {"color": colours, "size": 11},
            "line": line,
            "height": 22,
        },
    }
    margin = {"l": 14, "b": 8, "t": 38}
    return figure([table], title, dark, height=38 + 8 + 36 + height, margin=margin)


# ---- what is compared ----------------------------------------------------------------------------------


def _expected(step: Step, buffer: str) -> tuple[Expectation | None, tuple[Field, ...]]:
    """What the buffer should hold, and the fields that are compared."""
    if buffer in step.dispatch.writes:
        return step.expected(buffer), step.plan.buffers[buffer].fields
    if buffer not in step.written:
        return None, ()
    old = step.value_before(buffer)  # not the kernel's to write
    return Expected(old, np.ones(old.shape, bool), np.zeros(old.shape)), step.plan.buffers[buffer].fields


def _where(step: Step, buffer: str, part: Field, place: int) -> str:
    length = part.stop - part.start
    row, inner = divmod(place, length)
    return step.describe(buffer, row * step.plan.buffers[buffer].shape[-1] + part.start + inner)[1]


def _check(mode: str) -> None:
    if mode not in MODES:
        raise ArgumentError(f"The mode is {', '.join(MODES[:-1])} or {MODES[-1]}, not {mode!r}.")


def _distances(d: Distances, mode: str) -> np.ndarray:
    """The distances of the elements that differ; infinite where no number tells."""
    _check(mode)
    if mode != "ulp" or d.got.dtype.kind != "f":
        return d.share if mode == "relative" else d.off
    with np.errstate(all="ignore"):
        ulp = d.off / np.spacing(np.abs(d.want[d.differing]).astype(np.float32))
    return np.where(np.isfinite(d.off) & np.isfinite(ulp), ulp, np.inf)


def _largest(want: np.ndarray, defined: np.ndarray) -> float:
    """The largest finite expected value without its sign."""
    known = np.abs(want.reshape(-1)[defined.reshape(-1)].astype(float))
    return float(known[known < 1e29].max(initial=_LEAST))


# ---- the map -------------------------------------------------------------------------------------------


def _laid_out(d: Distances, part: Field, defined: np.ndarray, changed: np.ndarray, mode: str) -> _Map:
    """The elements of a field as rows and columns: its first terms count rows, the others columns.

    Of the rows, those from the first to the last in which something is expected that has changed or is off.
    """
    terms, shape = part.terms, part.shape
    split = 1 if len(terms) > 1 else 0
    while split < len(terms) - 1:
        rows, columns = math.prod(shape[:split]), math.prod(shape[split:])
        if rows >= _LEAST_ROWS and columns <= 4 * CELLS[1]:
            break
        split += 1
    width = math.prod(shape[split:])
    here = (changed & defined).reshape(-1, width).any(1)
    here[d.differing // width] = True
    used = np.flatnonzero(here if here.any() else defined.reshape(-1, width).any(1))
    first, last = int(used[0]), int(used[-1]) + 1
    cut = slice(first * width, last * width)
    distance = np.where(defined[cut], 0.0, np.nan)
    distance[d.differing - first * width] = _distances(d, mode)
    beyond = np.zeros(len(distance), bool)
    beyond[d.differing - first * width] = ~(d.many <= part.tolerance)
    got, want, off, marked = (x.reshape(-1, width) for x in (d.got[cut], d.want[cut], distance, beyond))
    return _Map(got, want, off, marked, terms[:split], terms[split:], first)


def _figure(drawn: _Map, mode: str, largest: float, title: str, dark: bool) -> go.Figure:
    small = pooled(drawn.distance)
    at = small.rows, small.columns
    low, high = {
        "relative": (10.0**-_DECADES, 1.0),
        "absolute": (largest * 10.0**-_DECADES, largest),
        "ulp": (1.0, _MOST_ULP),
    }[mode]
    with np.errstate(divide="ignore"):
        level = np.log10(np.clip(small.values, low, high)).astype(np.float32)
    numbers = _numbers(drawn, small)
    told = np.concatenate(
        [numbers, np.stack([drawn.value[at], drawn.expected[at], small.values], -1)], -1
    ).astype(np.float32)
    terms = [*drawn.row_terms, *drawn.column_terms]
    hover = ", ".join(f"{name} %{{customdata[{i}]:d}}" for i, (name, _) in enumerate(terms))
    n = len(terms)
    hover += (
        f"<br>value %{{customdata[{n}]:.8g}}<br>expected %{{customdata[{n + 1}]:.8g}}"
        f"<br>{_OFF[mode]} %{{customdata[{n + 2}]:.3g}}<extra></extra>"
    )
    height, width = small.values.shape
    by_row, by_column = small.factors
    x, y = np.arange(width) * by_column, drawn.start + np.arange(height) * by_row
    data: list[dict[str, Any]] = [
        {
            "type": "heatmap", "x": x, "y": y, "z": level, "customdata": told, "hovertemplate": hover,
            "coloraxis": "coloraxis", "hoverongaps": False,
        },
    ]  # fmt: skip
    wild = np.isinf(small.values)
    if wild.any():
        orange = [[0, OKABE_ITO["orange"]], [1, OKABE_ITO["orange"]]]
        data.append(
            {
                "type": "heatmap", "x": x, "y": y, "z": np.where(wild, 1.0, np.nan).astype(np.float32),
                "customdata": told, "hovertemplate": hover, "colorscale": orange, "showscale": False,
                "hoverongaps": False,
            }
        )  # fmt: skip
    data += _crosses(drawn, small, x, y)
    tall = int(np.clip(110 + 9 * height, 170, 330))
    ticks = _ticks(mode, low, high, 2 if tall > 220 else 4)
    return figure(
        data,
        title,
        dark,
        height=tall,
        margin={"r": 84, "l": 70},
        plot_bgcolor=ground(dark),
        coloraxis={
            "colorscale": sequence(), "cmin": float(np.log10(low)), "cmax": float(np.log10(high)),
            "colorbar": {"title": {"text": _TITLES[mode], "side": "right"}, **ticks},
        },
        xaxis={
            "showgrid": False, "range": [x[0] - by_column / 2, x[-1] + by_column / 2],
            **_axis(small, 1, drawn.column_terms, 0, width),
        },
        yaxis={
            "showgrid": False, "range": [y[-1] + by_row / 2, y[0] - by_row / 2],
            **_axis(small, 0, drawn.row_terms, drawn.start, height),
        },
    )  # fmt: skip


_TITLES = {"relative": "of the largest", "absolute": "off by", "ulp": "ulp"}
_OFF = {"relative": "off, of the largest:", "absolute": "off by", "ulp": "off by, in ulp:"}


def _numbers(drawn: _Map, small: Pooled) -> np.ndarray:
    """What counts the element of each cell: [rows][columns][terms]."""
    found: list[np.ndarray] = []
    for terms, at, start in (
        (drawn.row_terms, small.rows, drawn.start),
        (drawn.column_terms, small.columns, 0),
    ):
        if terms:
            found += np.unravel_index(at + start, tuple(size for _, size in terms))
    return np.stack(found, -1)


def _axis(small: Pooled, axis: int, terms: Terms, start: int, cells: int) -> dict[str, Any]:
    """Title and ticks of an axis that counts by several terms: ticks say the outermost that change."""
    if not terms:
        return {"showticklabels": False, "ticks": ""}
    title = small.title(axis, " · ".join(name for name, _ in terms))
    if len(terms) == 1:
        return {"title": {"text": title}, "tickformat": "d", "dtick": _whole(cells * small.factors[axis])}
    count = cells * small.factors[axis]
    sizes = [size for _, size in terms]
    inner = [int(np.prod(sizes[i + 1 :])) for i in range(len(sizes))]
    # The innermost term of which the axis has few enough steps.
    level = max((i for i, step in enumerate(inner) if count / step <= 10), default=0)
    step = inner[level]
    first = -(-start // step) * step
    places = np.arange(first, start + count, step)
    places = places[:: max(1, -(-len(places) // 10))]
    told = np.stack(np.unravel_index(np.minimum(places, int(np.prod(sizes)) - 1), sizes), -1)
    texts = [", ".join(map(str, row[: level + 1].tolist())) for row in told]
    return {"title": {"text": title}, "tickvals": places, "ticktext": texts}


def _whole(count: int) -> int:
    """The distance of at most some ten ticks over so many whole numbers: 1, 2 or 5, times a power of ten."""
    return next(
        digit * 10**power for power in range(12) for digit in (1, 2, 5) if digit * 10**power * 10 >= count
    )


def _crosses(drawn: _Map, small: Pooled, x: np.ndarray, y: np.ndarray) -> list[dict[str, Any]]:
    """Marks on cells whose elements are beyond rounding: on the worst, where there are many."""
    marked = drawn.beyond[small.rows, small.columns] | np.isinf(small.values)
    if not marked.any():
        return []
    cells = np.flatnonzero(marked)
    worst = cells[np.argsort(-small.values.reshape(-1)[cells], kind="stable")][:MARKED]
    rows, columns = np.unravel_index(worst, small.values.shape)
    marker = {
        "symbol": "x",
        "size": 7,
        "color": OKABE_ITO["vermillion"],
        "line": {"width": 0.8, "color": "#fff"},
    }
    place = {"x": x[columns], "y": y[rows], "hoverinfo": "skip", "name": "beyond rounding"}
    return [{"type": "scatter", "mode": "markers", "marker": marker, "showlegend": False, **place}]


def _ticks(mode: str, low: float, high: float, every: int) -> dict[str, Any]:
    """Ticks of the colours, ``every`` so many decades; of absolute distances, down from the largest."""
    if mode == "absolute":
        places = np.log10(high) - np.arange(0, _DECADES + 1, every)
    else:
        places = np.arange(np.log10(low), np.log10(high) + 0.01, every)
    return {"tickvals": places, "ticktext": [f"{10.0**p:.0e}" if p else "1" for p in places]}
