"""A widget that shows Plotly figures and follows the theme of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

# plotly.js is a script; the browser imports it as a module from what this wraps around it.
_BEFORE = "const module = {exports: {}}, exports = module.exports, define = undefined;\n"
_AFTER = "\nglobalThis.Plotly ??= module.exports;\nexport default globalThis.Plotly;\n"


@dataclass(frozen=True)
class Shown:
    """A figure and a sentence that says what is seen in it, for those who cannot see it."""

    figure: Figure
    label: str


class Figures(anywidget.AnyWidget):
    """Figures below each other, drawn anew in place by ``show``.

    plotly's own FigureWidget compares and sends every attribute, which takes 100 ms at least, and shows its
    first data after the page is loaded again; this one sends a figure whole and only if it changed.
    ``dark`` is what the page's theme is.
    """

    _esm = Path(__file__).with_name("figures.js")
    figures = traitlets.List(traitlets.Dict()).tag(sync=True)
    serial = traitlets.Int(0).tag(sync=True)
    dark = traitlets.Bool(False).tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(self._answer)

    def show(self, figures: Sequence[Shown]) -> None:
        """Draw these, in this order."""
        told = [{"figure": shown.figure.to_json(), "label": shown.label} for shown in figures]
        if told == self.figures:
            return
        with self.hold_sync():
            self.figures = told
            self.serial += 1

    def _answer(self, _: Any, message: Any, __: Any) -> None:
        if isinstance(message, dict) and message.get("kind") == "plotly.js":
            self.send({"kind": "plotly.js"}, [(_BEFORE + get_plotlyjs() + _AFTER).encode()])
