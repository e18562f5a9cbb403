"""Sparse attention by chunk and along the cells: what a kernel's partials say, beside the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..qsa.readings import Cellweights, Masses
from .style import REFERENCE, figure, kernel_colour

__all__ = ["cell_shares", "chunk_shares"]

SPANS = 256  # of the cell axis, at most
_ROOM, _LEGEND = {"t": 60}, {"y": 0.9}  # for a legend below the title


def chunk_shares(masses: Masses, head: int, *, dark: bool = False) -> go.Figure:
    """The share of a head's attention that each chunk has, by the maxima and sums that the kernel wrote.

    A bar for each chunk, in the order of the list of cells, and a diamond where the reference has it: all is
    right where the diamonds sit on the ends of the bars. Hover gives maximum, sum and entries of the list.
    """
    first = masses.length * np.arange(masses.maxima.shape[1])
    last = np.minimum(first + masses.length, masses.listed) - 1
    hover = (
        "chunk %{x}, entries %{customdata[0]} to %{customdata[1]}<br>share %{y:.6g}<br>"
        "max %{customdata[2]:.7g}, sum %{customdata[3]:.7g}"
    )

    def told(maxima: np.ndarray, sums: np.ndarray) -> dict[str, Any]:
        return {"customdata": np.stack([first, last, maxima[head], sums[head]], -1), "hovertemplate": hover}

    data = [
        {
            "type": "bar",
            "name": "kernel",
            "y": masses.shares[head],
            "marker": {"color": kernel_colour(dark)},
            **told(masses.maxima, masses.sums),
        },
        {
            "type": "scatter",
            "name": "reference",
            "mode": "markers",
            "y": masses.reference_shares[head],
            "marker": {"color": REFERENCE, "symbol": "diamond-open", "size": 7},
            **told(masses.reference_maxima, masses.reference_sums),
        },
    ]
    return figure(
        data,
        f"Token {masses.token}, head {head}: attention by chunk of {masses.length} cells",
        dark,
        height=250,
        margin=_ROOM,
        legend=_LEGEND,
        xaxis={"title": {"text": "chunk"}, "tickformat": "d", "showgrid": False},
        yaxis={"title": {"text": "share of the attention"}, "rangemode": "tozero"},
    )


def cell_shares(weights: Cellweights, n_kv: int, *, dark: bool = False) -> go.Figure:
    """Where among the ``n_kv`` cells that a token sees a head's attention lies.

    Shares of the cells are added up over spans of equal length (one cell, where there are few): a bar for the
    kernel, a line of steps along the tops for the reference. Cells that were not chosen have none, those that
    the kernel listed and that there are not are left out.
    """
    span = -(-n_kv // SPANS)
    there = (weights.cells >= 0) & (weights.cells < n_kv)
    places, count = weights.cells[there] // span, -(-n_kv // span)
    middle = span * np.arange(count) + (span - 1) / 2

    def added(shares: np.ndarray) -> np.ndarray:
        """NaN where there are none at all yet, so that nothing is drawn."""
        known = len(shares) and not np.isnan(shares).all()
        return np.bincount(places, shares[there], count) if known else np.full(count, np.nan)

    first = span * np.arange(count)
    cells = np.stack([first, np.minimum(first + span, n_kv) - 1], -1)
    hover = "cells %{customdata[0]} to %{customdata[1]}<br>share %{y:.6g}"
    data = [
        {
            "type": "bar",
            "name": "kernel",
            "x": middle,
            "y": added(weights.kernel),
            "marker": {"color": kernel_colour(dark), "line": {"width": 0}},
            "customdata": cells,
            "hovertemplate": hover,
        },
        {
            "type": "scatter",
            "name": "reference",
            "mode": "lines",
            "line": {"shape": "hvh", "width": 1, "color": REFERENCE},
            "x": middle,
            "y": added(weights.reference),
            "customdata": cells,
            "hovertemplate": hover,
        },
    ]
    of = "each cell" if span == 1 else f"every {span} cells"
    return figure(
        data,
        f"Token {weights.token}, head {weights.head}: attention along the cells",
        dark,
        height=250,
        margin=_ROOM,
        legend=_LEGEND,
        xaxis={"title": {"text": f"cell (of 0 to {n_kv - 1})"}, "tickformat": "d", "showgrid": False},
        yaxis={"title": {"text": f"share of {of}"}, "rangemode": "tozero"},
    )
