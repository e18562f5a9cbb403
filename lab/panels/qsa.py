"""The QSA system in the stepping panel: its form, its focus, the selection and the attention in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from html import escape
from typing import Any

import ipywidgets as widgets
import numpy as np

from ..errors import ArgumentError
from ..qsa import data, readings
from ..qsa.cache import Cache
from ..qsa.plans import plans
from ..qsa.session import Session
from ..qsa.sizes import MAX_TOKENS, PATHS, Sizes
from ..systems import Step, Trace
from ..views import cells, chunks, radix, selection
from .figures import Shown
from .form import DESCRIBED, Form, bounded, choice, error_of, focus_of, following, rows_of, whole
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


class Subject(Form):
    """QSA with a form for its sizes and data: see ``lab.panels.panel.Subject``.

    ``given`` are the user's own cache, qfull, qcur, k, v, as ``lab.qsa.trace`` takes them; ``needles`` the
    cells in it that hold what the tokens look for.
    """

    title = "QSA: sparse attention over an 8-bit cache"

    def __init__(self, session: Session, given: Given | None = None, needles: tuple[int, ...] = ()) -> None:
        super().__init__(session)
        self._recording = session.recording
        self._given, self._needles = given, needles
        self._made: tuple[Any, tuple[Given, tuple[int, ...]]] | None = None
        self.form = self._build_form()
        self.focus = self._build_focus()
        self._adapt()

    # ---- the form --------------------------------------------------------------------------------------

    def _build_form(self) -> widgets.Widget:
        first = next(iter(PRESETS.values()))
        self.preset = widgets.Dropdown(options=[*PRESETS, OWN], description="sizes", style=DESCRIBED)
        self.numbers = {
            name: whole("cells of context" if name == "cells" else name, first[name], tip)
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
        self.per_call = whole("tokens a call", MAX_TOKENS, f"1 to {MAX_TOKENS}")
        self.path = choice("path", PATHS, 100, "v2")
        sources = [("random", RANDOM), ("random, with needles", NEEDLES)]
        if self._given:
            sources.append(("your own arrays", YOURS))
        self.data = widgets.Dropdown(
            options=sources, value=YOURS if self._given else RANDOM, description="data", style=DESCRIBED
        )
        self.seed = whole("seed", 0, "of the random numbers")
        for widget in (*self.numbers.values(), self.per_call, self.path, self.data, self.seed):
            widget.observe(self._changed, "value")
        self.preset.observe(self._take_preset, "value")
        qd = widgets.HTML("<div class='ml dim'>qd = 256, as the kernels have it</div>")
        constants = [self.numbers[name] for name in CONSTANTS]
        lines = (
            [self.preset, *constants, qd],
            [self.numbers["cells"], self.numbers["tokens"], self.per_call, self.path, self.data, self.seed],
        )
        return rows_of(lines)

    def _take_preset(self, change: Mapping[str, Any]) -> None:
        if not self._quiet and change["new"] in PRESETS:
            with self._silently():
                for name, value in PRESETS[change["new"]].items():
                    self.numbers[name].value = value
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

    def begin(self) -> tuple[Trace, Iterator[Step]]:
        """A trace and the steps that record it. Raises ArgumentError for a form that makes no sense."""
        (cache, *inputs), needles = self._data()
        trace, steps = self._recording(cache, *inputs, tokens=self.per_call.value, path=self.path.value)
        if needles:
            trace.about["needles"] = list(needles)
        self._bound(self.token, int(trace.about["rows"]))
        self._bound(self.head, int(trace.about["sizes"]["qh"]))
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
        self.token = self.number = bounded("token", "whose selection and attention are shown")
        self.head = bounded("head", "query head whose attention is shown")
        self.pass_ = choice("pass", [1, 2, 3, 4], 100)
        self.follow = following("call")
        errors = [(f"error of {name}", name) for name in BUFFERS]
        self.buffer = choice("views", [("of the step", ""), *errors], 200)
        self.token.observe(self._number_chosen, "value")
        for widget in (self.head, self.pass_, self.follow, self.buffer):
            widget.observe(self._chosen, "value")
        return focus_of([self.token, self.follow, self.head, self.pass_, self.buffer])

    # ---- state and views -------------------------------------------------------------------------------

    def state(self, trace: Trace, position: int) -> str:
        """HTML: the call's arguments, the cut and the passes that find it, the kernel's list, the needles."""
        token = self._looked_at(trace, position)
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
        token = self._looked_at(trace, position)
        if self.buffer.value:
            return error_of(trace, position, str(self.buffer.value), dark)
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


BUFFERS = ("scores", "ids", "part", "xp", "kq", "ksc", "vq", "vsc")


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
