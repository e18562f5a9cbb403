"""What all views share: colours that colour-blind readers tell apart, in light and dark, and pooled arrays.

Colours are never alone: beside each stands a symbol, a word or a place.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

__all__ = ["OKABE_ITO", "Pooled", "diverging", "figure", "ink", "note", "pooled", "sequence", "template"]

OKABE_ITO = {
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "yellow": "#F0E442",
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "purple": "#CC79A7",
    "grey": "#999999",
}
"""Colours of categories, after Okabe and Ito."""

CELLS = (64, 256)  # of a heatmap, at most: rows and columns
_RED_BLUE = ("#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b")
_RED_BLUE_DARK = ("#9ecae9", "#4f94c4", "#1f4e79", "#1c1c1e", "#7a2a1d", "#d6604d", "#f7b799")
_VIRIDIS = (
    "#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b",
    "#fde725",
)  # fmt: skip


def ink(dark: bool) -> str:
    """The colour of text, and of marks that have to stand out from all others."""
    return "#e3e5e8" if dark else "#1c1e21"


def faint(dark: bool) -> str:
    """The colour of what is there but does not count."""
    return "#6b7178" if dark else "#b6bbc1"


def dim(dark: bool) -> str:
    """The colour of what counts less, and still has to be seen one by one."""
    return "#8d949b" if dark else "#868d94"


def ground(dark: bool) -> str:
    """The colour behind maps: that of places without a value."""
    return "#2b2f34" if dark else "#e9ebee"


def kernel_colour(dark: bool) -> str:
    """The colour of what kernels wrote."""
    return OKABE_ITO["sky" if dark else "blue"]


REFERENCE = OKABE_ITO["vermillion"]
"""The colour of what the reference says."""


def _stops(colours: Sequence[str]) -> list[list[Any]]:
    return [[i / (len(colours) - 1), colour] for i, colour in enumerate(colours)]


def sequence() -> list[list[Any]]:
    """The colour scale of quantities: Viridis, the brighter the more."""
    return _stops(_VIRIDIS)


def for_marks(dark: bool) -> list[list[Any]]:
    """Viridis for points and lines, without the end that is like the page."""
    return _stops(_VIRIDIS[2:] if dark else _VIRIDIS[:-1])


def diverging(dark: bool) -> list[list[Any]]:
    """The colour scale of what has a sign: blue below zero, red above, and zero like the page."""
    return _stops(_RED_BLUE_DARK if dark else _RED_BLUE)


@functools.cache
def template(dark: bool = False) -> go.layout.Template:
    """A Plotly template for all views; what is behind the figure shows through."""
    line, grid = ("#6b7178", "#34383d") if dark else ("#9aa0a6", "#e4e6e9")
    axis = {
        "showline": True,
        "linecolor": line,
        "gridcolor": grid,
        "zeroline": False,
        "ticks": "outside",
        "ticklen": 3,
        "tickcolor": line,
        "tickfont": {"size": 11},
        "title": {"font": {"size": 12}, "standoff": 4},
        "exponentformat": "e",
    }
    bar = {"thickness": 9, "outlinewidth": 0, "tickfont": {"size": 10}, "exponentformat": "e", "xpad": 4}
    told = {
        "font": {"color": ink(dark), "size": 12, "family": _FONT},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "title": {
            "x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
            "pad": {"t": 8}, "font": {"size": 13.5},
        },
        "legend": {
            "orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
            "font": {"size": 11}, "bgcolor": "rgba(0,0,0,0)",
        },
        "hoverlabel": {
            "align": "left", "font": {"size": 12, "family": _FONT, "color": ink(dark)},
            "bgcolor": "#26292d" if dark else "#ffffff", "bordercolor": line,
        },
        "hovermode": "closest",
        "bargap": 0.12,
        "xaxis": axis,
        "yaxis": axis,
        "coloraxis": {"colorbar": bar},
        "annotationdefaults": {"font": {"size": 11.5}, "showarrow": False},
    }  # fmt: skip
    return go.layout.Template({"layout": told})


_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def figure(data: list[Any], title: str, dark: bool, **layout: Any) -> go.Figure:
    """A figure of traces as plain mappings, under a title. ``layout`` names the height at least."""
    margin = {"l": 62, "r": 14, "t": 36, "b": 42} | layout.pop("margin", {})
    legend = {"y": 1 - _BELOW_TITLE / layout["height"]} | layout.pop("legend", {})
    # Figures are built while somebody waits for them: each further call into Plotly would show.
    told = {"template": template(dark), "title": {"text": title}, "margin": margin, "legend": legend}
    return go.Figure(data, {**told, **layout})


_BELOW_TITLE = 24  # pixels, where the legend begins


def note(title: str, text: str, dark: bool, height: int = 130) -> go.Figure:
    """A figure without a picture, that says why there is none."""
    axes = {"xaxis": {"visible": False}, "yaxis": {"visible": False}}
    lines = "<br>".join(escape(line) for line in textwrap.wrap(text, 90))
    return figure([], title, dark, height=height, annotations=[centred(lines, 0.5, 0.5, dark)], **axes)


def behind(dark: bool) -> str:
    """The colour behind a text that lies on other things."""
    return "rgba(21,23,26,.85)" if dark else "rgba(255,255,255,.85)"


def centred(text: str, x: float, y: float, dark: bool) -> dict[str, Any]:
    """A text in the middle of a place that is empty: ``x`` and ``y`` in parts of the figure's inside."""
    place = {"x": x, "y": y, "xref": "paper", "yref": "paper"}
    return {"text": text, "font": {"size": 13}, "bgcolor": behind(dark), "borderpad": 3, **place}


def heading(text: str, domain: tuple[float, float], top: float = 1.0) -> dict[str, Any]:
    """The heading of a part of a figure, above the middle of its x ``domain``."""
    return {
        "text": text,
        "x": (domain[0] + domain[1]) / 2,
        "y": top,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "center",
        "yanchor": "bottom",
        "yshift": 2,
    }


def domains(*widths: float, gap: float | Sequence[float] = 0.05) -> list[tuple[float, float]]:
    """Neighbouring parts of an axis: in proportion to ``widths``, and with gaps, from 0 to 1."""
    gaps = [gap] * (len(widths) - 1) if isinstance(gap, float | int) else list(gap)
    scale = (1 - sum(gaps)) / sum(widths)
    found, start = [], 0.0
    for width, after in zip(widths, [*gaps, 0.0], strict=True):
        found.append((round(start, 4), round(min(1.0, start + width * scale), 4)))
        start += width * scale + after
    return found


def extent(*values: np.ndarray) -> float:
    """The largest distance from zero of any finite value; 1 where there is none but zero."""
    largest = max((float(np.abs(v[np.isfinite(v)]).max(initial=0)) for v in values), default=0.0)
    return largest or 1.0


def around_zero(values: np.ndarray) -> dict[str, Any]:
    """Range and ticks of a low axis on which ``values`` lie on both sides of zero."""
    reach = extent(values)
    step = 10.0 ** np.floor(np.log10(reach))
    tick = float(np.floor(reach / step) * step)
    told = f"{tick:.0g}".replace("e-0", "e-")
    return {
        "range": [-1.25 * reach, 1.25 * reach],
        "tickvals": [-tick, 0, tick],
        "ticktext": [f"−{told}", "0", told],
    }


# ---- large arrays --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pooled:
    """An array [rows][columns] made small: each cell has the value furthest from zero of those it stands for.

    ``values`` are float64; NaN is passed over, and is there only where a cell has nothing else. The value of
    a cell was at ``rows``, ``columns`` of the array; ``factors`` are how many of each a cell stands for.
    """

    values: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    factors: tuple[int, int]

    def title(self, axis: int, name: str) -> str:
        """The title of an axis (0: rows, 1: columns), which says so where cells stand for several."""
        factor = self.factors[axis]
        return name if factor == 1 else f"{name} (largest of each {factor})"


def pooled(array: np.ndarray, limits: tuple[int, int] = CELLS) -> Pooled:
    """``array`` [rows][columns] in at most ``limits`` cells, max-pooled by absolute value."""
    values = np.asarray(array, float)
    height, width = values.shape
    by_row, by_column = max(1, -(-height // limits[0])), max(1, -(-width // limits[1]))
    rows, columns = np.indices((height, width), sparse=True)
    if by_row == by_column == 1:
        full = np.broadcast_arrays(rows, columns)
        return Pooled(values, full[0], full[1], (1, 1))
    down, across = -(-height // by_row), -(-width // by_column)
    padded = np.full((down * by_row, across * by_column), np.nan)
    padded[:height, :width] = values
    tiles = padded.reshape(down, by_row, across, by_column).swapaxes(1, 2).reshape(down, across, -1)
    best = np.where(np.isnan(tiles), -1.0, np.abs(tiles)).argmax(-1)
    # A tile of NaN alone has its first element, which is always inside the array.
    found = np.take_along_axis(tiles, best[..., None], -1)[..., 0]
    inner_row, inner_column = np.divmod(best, by_column)
    at_rows = np.arange(down)[:, None] * by_row + inner_row
    at_columns = np.arange(across) * by_column + inner_column
    return Pooled(found, at_rows, at_columns, (by_row, by_column))
