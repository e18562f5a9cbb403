"""The QSA system in the stepping panel: its form, its focus, the selection and the attention in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from html import escape
from typing import Any

import ipywidgets as widgets
import numpy as np

from .. import systems
from ..errors import ArgumentError
from ..qsa import data, readings
from ..qsa.cache import Cache
from ..qsa.plans import plans
from ..qsa.session import Session
from ..qsa.sizes import MAX_TOKENS, PATHS, Sizes
from ..systems import Step, Trace
from ..views import cells, chunks, deviation, radix, selection
from .figures import Shown
from .panel import Panel

Given = tuple[Cache, Any, Any, Any, Any]  # the cache, qfull, qcur, k, v

RANDOM, NEEDLES, YOURS = "random", "needles", "yours"
PLANTED = 3  # needles
MOST_CELLS = 1 << 16  # that the panel makes up: they are to be there in a moment
MOST_TOKENS = 256

CONSTANTS = ("qh", "qkv", "qbudget", "qch", "qch2", "qhg")
SPECIFIED = {name: value for name, value in asdict(Sizes()).items() if name in CONSTANTS}
PRESETS: Mapping[str, Mapping[str, int]] = {
    "as specified": {**SPECIFIED, "cells": 4096, "tokens": 2},
    "small, to follow by hand": {**SPECIFIED, "qbudget": 19, "qch": 8, "qch2": 4, "cells": 64, "tokens": 2},
}
OWN = "as set below"


class Subject:
    """QSA with a form for its sizes and data: see ``lab.panels.panel.Subject``.

    ``given`` are the user's own cache, qfull, qcur, k, v, as ``lab.qsa.trace`` takes them; ``needles`` the
    cells in it that hold what the tokens look for.
    """

    title = "QSA: sparse attention over an 8-bit cache"

    def __init__(self, session: Session, given: Given | None = None, needles: tuple[int, ...] = ()) -> None:
        self.session: systems.Session = session
        self._recording = session.recording
        self.on_change: Callable[[], None] = _nothing
        self.on_focus: Callable[[], None] = _nothing
        self._given, self._needles = given, needles
        self._made: tuple[Any, tuple[Given, tuple[int, ...]]] | None = None
        self._quiet = False
        self.form = self._build_form()
        self.focus = self._build_focus()
        self._adapt()

    # ---- the form --------------------------------------------------------------------------------------

    def _build_form(self) -> widgets.Widget:
        first = next(iter(PRESETS.values()))
        self.preset = widgets.Dropdown(options=[*PRESETS, OWN], description="sizes", style=_DESCRIBED)
        self.numbers = {
            name: _number("cells of context" if name == "cells" else name, first[name], tip)
            for name, tip in (
                ("qh", "query heads"),
                ("qkv", "KV heads"),
                ("qbudget", "cells that a token may attend to"),
                ("qch", "cells of a chunk on v1 and v3"),
                ("qch2", "cells of a chunk on v2"),
                ("qhg", "groups of the query heads of a KV head on v2"),
                ("cells", "cells in the cache before the first token"),
                ("tokens", "new tokens"),
            )
        }
        self.per_call = _number("tokens a call", MAX_TOKENS, f"1 to {MAX_TOKENS}")
        self.path = widgets.Dropdown(
            options=PATHS, value="v2", description="path", layout={"width": "100px"}, style=_DESCRIBED
        )
        sources = [("random", RANDOM), ("random, with needles", NEEDLES)]
        if self._given:
            sources.append(("your own arrays", YOURS))
        self.data = widgets.Dropdown(
            options=sources, value=YOURS if self._given else RANDOM, description="data", style=_DESCRIBED
        )
        self.seed = _number("seed", 0, "of the random numbers")
        for widget in (*self.numbers.values(), self.per_call, self.path, self.data, self.seed):
            widget.observe(self._changed, "value")
        self.preset.observe(self._take_preset, "value")
        qd = widgets.HTML("<div class='ml dim'>qd = 256, as the kernels have it</div>")
        constants = [self.numbers[name] for name in CONSTANTS]
        lines = (
            [self.preset, *constants, qd],
            [self.numbers["cells"], self.numbers["tokens"], self.per_call, self.path, self.data, self.seed],
        )
        made = widgets.VBox([widgets.Box(line, layout=_WRAP) for line in lines])
        made.add_class("metal-lab-form")
        return made

    def _take_preset(self, change: Mapping[str, Any]) -> None:
        if not self._quiet and change["new"] in PRESETS:
            with self._silently():
                for name, value in PRESETS[change["new"]].items():
                    self.numbers[name].value = value
            self.on_change()

    def _changed(self, _: Any) -> None:
        if self._quiet:
            return
        self._adapt()
        self.on_change()

    def _adapt(self) -> None:
        """What does not count is greyed out, and what the form's numbers amount to is named."""
        mine = self.data.value == YOURS
        with self._silently():
            if mine and self._given:
                cache, _, qcur, *_ = self._given
                told = {**asdict(cache.sizes), "cells": cache.cells, "tokens": len(qcur)}
                for name, number in self.numbers.items():
                    number.value = told[name]
            now = {name: number.value for name, number in self.numbers.items()}
            self.preset.value = next((name for name, preset in PRESETS.items() if preset == now), OWN)
        for widget in (*self.numbers.values(), self.preset):
            widget.disabled = mine
        self.seed.disabled = mine

    @contextmanager
    def _silently(self) -> Iterator[None]:
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def begin(self) -> tuple[Trace, Iterator[Step]]:
        """A trace and the steps that record it. Raises ArgumentError for a form that makes no sense."""
        (cache, *inputs), needles = self._data()
        trace, steps = self._recording(cache, *inputs, tokens=self.per_call.value, path=self.path.value)
        if needles:
            trace.about["needles"] = list(needles)
        with self._silently():
            rows = int(trace.about["rows"])
            self.token.max = max(self.token.value, rows - 1)
            self.token.value = min(self.token.value, rows - 1)
            self.token.max = rows - 1
            heads = int(trace.about["sizes"]["qh"])
            self.head.value = min(self.head.value, heads - 1)
            self.head.max = heads - 1
        return trace, steps

    def _data(self) -> tuple[Given, tuple[int, ...]]:
        """What the form asks for, and the needles in it; made anew only if it asks for something else."""
        if self.data.value == YOURS and self._given:
            return self._given, self._needles
        numbers = {name: int(number.value) for name, number in self.numbers.items()}
        cells, tokens, seed = numbers.pop("cells"), numbers.pop("tokens"), int(self.seed.value)
        for count, least, most, what in (
            (tokens, 1, MOST_TOKENS, "new tokens"),
            (cells, 0, MOST_CELLS, "cells of context"),
            (seed, 0, None, "as the seed"),
        ):
            if count < least or (most is not None and count > most):
                limits = f"{least} to {most}" if most is not None else f"{least} or more"
                raise ArgumentError(f"{count} {what}: the panel takes {limits}.")
        sizes = Sizes(**numbers, max_cells=cells + tokens)
        plans(sizes, tokens, cells, self.per_call.value, self.path.value)  # before any data is made
        asked = sizes, cells, tokens, seed, self.data.value
        if self._made is None or self._made[0] != asked:
            if self.data.value == NEEDLES:
                found = data.needles(sizes, cells, tokens, PLANTED, seed)
                self._made = asked, ((found.cache, *found.inputs), found.positions)
            else:
                self._made = asked, (data.example(sizes, cells, tokens, seed), ())
        return self._made[1]

    def row_position(self, trace: Trace, row: int) -> int:
        """The position after the call of token ``row``."""
        return readings.position_of(trace, row)

    # ---- the focus -------------------------------------------------------------------------------------

    def _build_focus(self) -> widgets.Widget:
        self.token = _bounded("token", "whose selection and attention are shown")
        self.head = _bounded("head", "query head whose attention is shown")
        self.pass_ = widgets.Dropdown(
            options=[1, 2, 3, 4], description="pass", layout={"width": "100px"}, style=_DESCRIBED
        )
        self.follow = widgets.Checkbox(
            True, description="follow the call", indent=False, layout={"width": "auto"}
        )
        self.buffer = widgets.Dropdown(
            options=[("of the step", ""), *((f"error of {name}", name) for name in BUFFERS)],
            description="views",
            layout={"width": "200px"},
            style=_DESCRIBED,
        )
        self.token.observe(self._token_chosen, "value")
        for widget in (self.head, self.pass_, self.follow, self.buffer):
            widget.observe(lambda _: self.on_focus(), "value")
        made = widgets.Box([self.token, self.follow, self.head, self.pass_, self.buffer], layout=_WRAP)
        made.add_class("metal-lab-focus")
        return made

    def _token_chosen(self, change: Mapping[str, Any]) -> None:
        if self._quiet:
            return
        if change["new"] not in self._rows:
            self.follow.value = False  # a token of another call is to be seen
        self.on_focus()

    def _focused(self, trace: Trace, position: int) -> int:
        """The token that is looked at: one of the call of the dispatch just run, if it is to follow it."""
        self._rows = range(int(trace.about["rows"]))
        if not self.follow.value or not position:
            return int(self.token.value)
        plan = trace[position - 1].plan
        self._rows = range(plan.first, plan.first + plan.rows)
        if self.token.value not in self._rows:
            with self._silently():
                self.token.value = self._rows[-1]
        return int(self.token.value)

    # ---- state and views -------------------------------------------------------------------------------

    def state(self, trace: Trace, position: int) -> str:
        """HTML: the call's arguments, the cut and the passes that find it, the kernel's list, the needles."""
        token = self._focused(trace, position)
        chosen = readings.chosen(trace, position, token, reference=False)
        lines = [
            ("Arguments", readings.arguments_words(trace, token)),
            ("Selection", readings.selection_words(chosen)),
            ("List", _marked(chosen)),
            ("Needles", readings.needle_words(chosen)),
        ]
        told = "".join(f"<tr><th>{name}</th><td>{escape(text)}</td></tr>" for name, text in lines if text)
        cut = chosen.selection.cut if chosen.selection is not None else None
        passes = radix.passes(cut, int(self.pass_.value) - 1) if cut is not None else ""
        return f"<div class='ml'><b>Token {token}</b><table>{told}</table></div>{passes}"

    def figures(self, trace: Trace, position: int, dark: bool) -> list[Shown]:
        """The views that go with the dispatch just run, or the error of a buffer."""
        token = self._focused(trace, position)
        if self.buffer.value:
            return self._error(trace, position, dark)
        writes = trace[position - 1].dispatch.writes if position else ()
        if {"part", "xp"} & set(writes):
            return self._attention(trace, position, token, dark)
        chosen = readings.chosen(trace, position, token)
        scores = Shown(
            selection.block_scores(chosen, dark=dark),
            f"Block scores of token {token}. {readings.selection_words(chosen)}",
        )
        if "ids" not in writes:
            return [scores]
        along = Shown(
            cells.chosen_cells(chosen, dark=dark),
            f"Chosen cells of token {token}. {readings.list_words(chosen)}",
        )
        if chosen.selection is None or chosen.selection.cut is None:
            return [scores, along]
        passes = Shown(
            selection.radix_passes(chosen.selection, dark=dark),
            f"Histograms of the radix passes for token {token}: they end at key "
            f"0x{chosen.selection.cut.key:08X}.",
        )
        return [scores, along, passes]

    def _attention(self, trace: Trace, position: int, token: int, dark: bool) -> list[Shown]:
        head = int(self.head.value)
        masses = readings.chunk_masses(trace, position, token)
        weights = readings.cell_weights(trace, position, token, head)
        n_kv = int(trace.about["cells"]) + token + 1
        largest = np.abs(masses.shares - masses.reference_shares)[head].max()
        off = "" if np.isnan(largest) else f" They are off by {largest:.1e} at most."
        told = f"head {head} of token {token}, by the kernel and by the reference"
        return [
            Shown(chunks.chunk_shares(masses, head, dark=dark), f"Shares of the chunks, {told}.{off}"),
            Shown(chunks.cell_shares(weights, n_kv, dark=dark), f"Attention along the cells, {told}."),
        ]

    def _error(self, trace: Trace, position: int, dark: bool) -> list[Shown]:
        """Of the buffer chosen, as the last dispatch that wrote it left it."""
        name = str(self.buffer.value)
        step = next((s for s in reversed(trace[:position]) if name in s.dispatch.writes), None)
        if step is None:
            return []
        told = f"Error of {name} after dispatch {step.number}, {step.kernel}."
        return [Shown(deviation.of_step(step, name, dark=dark), told)]


BUFFERS = ("scores", "ids", "part", "xp", "kq", "ksc", "vq", "vsc")
_WRAP = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="0 10px")
_DESCRIBED = {"description_width": "initial"}  # else long names are cut off


def _nothing() -> None: ...


def _number(name: str, value: int, tip: str) -> widgets.IntText:
    return widgets.IntText(value, description=name, tooltip=tip, layout=_sized(name), style=_DESCRIBED)


def _bounded(name: str, tip: str) -> widgets.BoundedIntText:
    return widgets.BoundedIntText(
        0, min=0, max=0, description=name, tooltip=tip, layout=_sized(name), style=_DESCRIBED
    )


def _sized(name: str) -> dict[str, str]:
    """Room for the name and a number of five digits."""
    return {"width": f"{70 + 8 * len(name)}px"}


def _marked(chosen: readings.Chosen) -> str:
    sign = "✓ " if chosen.agrees else "✗ " if chosen.kernel_ids is not None else ""
    return sign + readings.list_words(chosen)


def panel(session: Session, *given: Any) -> Panel:
    """A stepping panel of ``session``: on random data, or on what is given, ``data.Needles`` or cache, qfull,
    qcur, k, v as ``lab.qsa.trace`` takes them."""
    if len(given) == 1 and isinstance(given[0], data.Needles):
        needles = given[0]
        return Panel(Subject(session, (needles.cache.copy(), *needles.inputs), needles.positions))
    if not given:
        return Panel(Subject(session))
    cache, *inputs = given
    return Panel(Subject(session, (cache.copy(), *inputs)))
