"""The o1 system in the stepping panel: its form, its focus, rings, masses and what a step does in words."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets
import mlx.core as mx
import numpy as np

from .. import o1
from ..errors import ArgumentError
from ..o1 import data, narration, readings
from ..o1.plans import plans
from ..o1.session import Session
from ..o1.sizes import PATHS, TOKEN_DIMENSIONS, Sizes
from ..o1.state import State
from ..systems import Step, Trace
from ..systems.plan import SCRATCH
from ..views import attention, far
from ..views.flow import flow_svg
from ..views.ring import ring_svg
from .figures import Shown
from .form import DESCRIBED, Form, bounded, choice, error_of, focus_of, following, rows_of, whole
from .panel import Panel

Given = tuple[State, Any, Any, Any]  # the state, q, k, v

RANDOM, TEXT, YOURS = "random", "text", "yours"
MOST_ROWS = 8192  # that the panel makes up
MOST_NUMBERS = 1 << 28  # of a trace: they have to fit into memory
MOST_GROUPS = 12  # whose meta is told
ROWS_SHOWN = 24  # of the split, at least
RCOND = 0.01  # for the landmarks of a text: see ``State.sealed``

SIZES = ("ng", "hpg", "d", "w", "ns", "m")
PRESETS: Mapping[str, Mapping[str, int]] = {
    "default": {"ng": 2, "hpg": 4, "d": 128, "w": 128, "ns": 4, "m": 16, "rows": 240, "chunk": 16},
    "a ring of 8 slots, to follow by hand": {
        "ng": 1, "hpg": 1, "d": 8, "w": 8, "ns": 2, "m": 3, "rows": 24, "chunk": 1,
    },
}  # fmt: skip
OWN = "as set below"


class Subject(Form):
    """o1 with a form for its sizes and data: see ``lab.panels.panel.Subject``.

    ``given`` are the user's own state, q, k, v, as ``lab.o1.trace`` takes them. ``numbers`` are what the form
    shows at first, by the names in PRESETS; ``windows`` the groups' own windows, ``scale`` what scores of
    random data are multiplied with.
    """

    title = "o1: constant-memory attention"

    def __init__(
        self,
        session: Session,
        given: Given | None = None,
        *,
        numbers: Mapping[str, int] | None = None,
        windows: Sequence[int] | None = None,
        scale: float | None = None,
        path: str = "chunk",
        seed: int = 0,
    ) -> None:
        super().__init__(session)
        self._recording = session.recording
        self._given, self._scale = given, scale
        self._made: tuple[Any, tuple[Given, tuple[str, ...]]] | None = None
        self.form = self._build_form({**PRESETS["default"], **(numbers or {})}, windows or (), path, seed)
        self.focus = self._build_focus()
        self._adapt()

    # ---- the form --------------------------------------------------------------------------------------

    def _build_form(
        self, first: Mapping[str, int], windows: Sequence[int], path: str, seed: int
    ) -> widgets.Widget:
        self.preset = choice("sizes", [*PRESETS, OWN], 280)
        self.numbers = {
            name: whole(text, first[name], tip)
            for name, text, tip in (
                ("ng", "groups", "ng: KV heads"),
                ("hpg", "heads per group", "hpg: query heads of a KV head"),
                ("d", "head dimension", "d: a multiple of 4; 128 or 256 on the token path"),
                ("w", "window", "w: slots of the ring"),
                ("ns", "sinks", "ns: tokens that every row attends to"),
                ("m", "landmarks", "m: of each head"),
                ("rows", "rows", "tokens to come"),
                ("chunk", "chunk rows", "rows of a chunk: at most 64, and the smallest window"),
            )
        }
        self.windows = widgets.Text(
            ", ".join(map(str, windows)),
            description="windows of groups",
            placeholder="all of w",
            tooltip="a window for each group, with commas between them; 0 for all of w",
            continuous_update=False,
            layout={"width": "230px"},
            style=DESCRIBED,
        )
        kinds = [("random", RANDOM), ("a text, as MiniLM sees it", TEXT)]
        self.path = choice("path", [*_PATHS.items()], 180, path)
        self.data = choice("data", [*kinds, ("your own arrays", YOURS)] if self._given else kinds, 230)
        self.data.value = YOURS if self._given else RANDOM
        self.seed = whole("seed", seed, "of the random numbers")
        self.source = widgets.HTML()
        for widget in (*self.numbers.values(), self.windows, self.path, self.data, self.seed):
            widget.observe(self._changed, "value")
        self.preset.observe(self._take_preset, "value")
        lines = (
            [self.preset, *(self.numbers[name] for name in SIZES), self.windows],
            [self.numbers["rows"], self.numbers["chunk"], self.path, self.data, self.seed, self.source],
        )
        return rows_of(lines)

    def _take_preset(self, change: Mapping[str, Any]) -> None:
        if self._quiet or change["new"] not in PRESETS:
            return
        preset = PRESETS[change["new"]]
        with self._silently():
            self.windows.value = ""
            for name, value in preset.items():
                self.numbers[name].value = value
            if preset["d"] not in TOKEN_DIMENSIONS and self.path.value == "token":
                self.path.value = "chunk"
        self._adapt()
        self.on_change()

    def _adapt(self) -> None:
        """What does not count is greyed out, what the data fix is shown, and what the numbers amount to is
        named."""
        kind, fixed = self.data.value, dict[str, int]()
        if kind == YOURS and self._given:
            z, q = self._given[0].sizes, self._given[1]
            fixed = {name: getattr(z, name) for name in SIZES}
            fixed["rows"] = int(np.shape(q)[0]) if np.ndim(q) else 0
        elif kind == TEXT:
            fixed = {"hpg": 1, "d": _layer().q.shape[2]}
        with self._silently():
            for name, value in fixed.items():
                self.numbers[name].value = value
            if kind == YOURS and self._given:
                self.windows.value = ", ".join(map(str, self._given[0].sizes.windows or ()))
            now = {name: number.value for name, number in self.numbers.items()}
            alike = (name for name, preset in PRESETS.items() if preset == now)
            self.preset.value = OWN if self.windows.value.strip() else next(alike, OWN)
        for name, number in self.numbers.items():
            number.disabled = name in fixed
        self.numbers["chunk"].disabled = self.path.value == "token"  # whose chunks have one row
        self.preset.disabled = self.seed.disabled = kind != RANDOM
        self.windows.disabled = kind == YOURS
        self.source.value = f"<div class='ml dim'>{escape(_layer().source)}</div>" if kind == TEXT else ""

    def begin(self) -> tuple[Trace, Iterator[Step]]:
        """A trace and the steps that record it. Raises ArgumentError for a form that makes no sense."""
        (state, *inputs), texts = self._data()
        chunks, path = self._chunks, self.path.value
        trace, steps = self._recording(state, *inputs, chunks=chunks, path=path)
        if texts:
            trace.about["tokens"] = list(texts)
        self._bound(self.row, int(trace.about["rows"]))
        self._bound(self.head, state.sizes.nh)
        return trace, steps

    @property
    def _chunks(self) -> int:
        return 1 if self.path.value == "token" else int(self.numbers["chunk"].value)

    def _data(self) -> tuple[Given, tuple[str, ...]]:
        """What the form asks for, and the texts of its tokens, if any; made anew only if that changed."""
        if self.data.value == YOURS and self._given:
            state, q, _, _ = self._given
            self._affordable(state.sizes, int(np.shape(q)[0]) if np.ndim(q) else 0)
            return self._given, ()
        sizes, rows, seed = self._sizes(), int(self.numbers["rows"].value), int(self.seed.value)
        if not 1 <= rows <= MOST_ROWS:
            raise ArgumentError(f"{rows} rows: the panel takes 1 to {MOST_ROWS}.")
        if seed < 0:
            raise ArgumentError(f"{seed} as the seed: the panel takes 0 or more.")
        self._affordable(sizes, rows)
        asked = sizes, rows, self.data.value, seed
        if self._made is None or self._made[0] != asked:
            made = _text(sizes, rows) if self.data.value == TEXT else (o1.example(sizes, rows, seed), ())
            self._made = asked, made
        return self._made[1]

    def _sizes(self) -> Sizes:
        numbers = {name: int(self.numbers[name].value) for name in SIZES}
        text = self.windows.value.replace(",", " ").split()
        if not all(word.isdecimal() for word in text):
            raise ArgumentError(
                f"Windows of groups are whole numbers with commas between them, not '{self.windows.value}'."
            )
        scale = self._scale if self.data.value == RANDOM else None
        return Sizes(**numbers, windows=tuple(map(int, text)) or None, scale=scale)

    def _affordable(self, sizes: Sizes, rows: int) -> None:
        """Raise ArgumentError where a trace would not fit into memory, before any data or plan is made."""
        z = sizes
        heads = z.nh * (z.m * (z.m + z.d) + 2 * rows * z.d)
        numbers = heads + 2 * z.ng * z.d * (z.w + z.ns + z.m + rows)
        if numbers <= MOST_NUMBERS:
            every = plans(z, rows, self._chunks, self.path.value)
            changing = (b for plan in every for b in plan.buffers.values() if b.role == SCRATCH)
            numbers += sum(b.size for b in changing) + len(every) * z.nh * z.m * z.d
        if numbers > MOST_NUMBERS:
            raise ArgumentError(
                f"A trace of these sizes takes {numbers * 4 / 2**30:.1f} GiB or more: the panel goes up to "
                f"{MOST_NUMBERS * 4 / 2**30:g}. Take fewer rows, or smaller sizes."
            )

    def row_position(self, trace: Trace, row: int) -> int:
        """The position after the chunk of ``row``."""
        return readings.position_of(trace, row)

    # ---- the focus -------------------------------------------------------------------------------------

    def _build_focus(self) -> widgets.Widget:
        self.row = self.number = bounded("row", "whose attention is shown")
        self.head = bounded("head", "query head that is looked at, and with it its group")
        self.follow = following("chunk")
        orders = [("both ways", "both"), ("as in memory", "memory"), ("in logical order", "logical")]
        self.order = choice("ring", orders, 170)
        errors = [(f"error of {name}", name) for name in BUFFERS]
        self.views = choice("views", [*_VIEWS, *errors], 250)
        self.row.observe(self._number_chosen, "value")
        for widget in (self.head, self.follow, self.order, self.views):
            widget.observe(self._chosen, "value")
        return focus_of([self.row, self.follow, self.head, self.order, self.views])

    # ---- state and views -------------------------------------------------------------------------------

    def state(self, trace: Trace, position: int) -> str:
        """HTML: what the dispatch just run did, the ring, the masses, ``meta`` in words, what must hold."""
        if not trace.about["rows"]:
            return "<div class='ml'>There are no rows.</div>"
        row, head = self._looked_at(trace, position), int(self.head.value)
        rings = readings.rings(trace, position)
        mine = rings[head // (trace.about["sizes"]["hpg"])]
        drawn = []
        for logical, name in ((False, "as in memory"), (True, "in logical order, oldest first")):
            if self.order.value in ("both", "logical" if logical else "memory"):
                caption = f"<div class='dim'>Ring of group {mine.group}, {name}</div>"
                drawn.append(caption + ring_svg(mine, logical=logical))
        return (
            f"<div class='ml'><b>{escape(_named(trace, row))}, head {head}</b>"
            f"<p style='margin:2px 0 6px' class='ml-happens'>"
            f"{escape(narration.happens(trace, position, row, head))}</p>"
            f"{''.join(drawn)}{flow_svg(readings.flow(trace, position, head))}"
            f"{_meta(rings, mine.group)}{_invariants(readings.invariants(trace, position))}</div>"
        )

    def figures(self, trace: Trace, position: int, dark: bool) -> list[Shown]:
        """The views that go with the dispatch just run, or those that were chosen."""
        if not trace.about["rows"]:
            return []
        row, head = self._looked_at(trace, position), int(self.head.value)
        chosen = str(self.views.value)
        if chosen in BUFFERS:
            return error_of(trace, position, chosen, dark)
        if chosen == "distance":
            return self._distance(trace, position, head, dark)
        made = {
            "attention": lambda: self._attention(trace, position, row, head, dark),
            "split": lambda: self._split(trace, position, row, head, dark),
            "gains": lambda: self._gains(trace, position, head, dark),
            "masses": lambda: self._masses(trace, position, head, dark),
        }
        if chosen:
            return [made[chosen]()]
        step = trace[position - 1] if position else None
        names = _views_of(step)
        if names or step is None:
            return [made[name]() for name in names or ("attention",)]
        return error_of(trace, position, step.dispatch.writes[0], dark)

    def _attention(self, trace: Trace, position: int, row: int, head: int, dark: bool) -> Shown:
        weights = readings.weights(trace, position, row, head)
        told = narration.split_words(weights) or (
            f"Attention of row {row}, head {head}, by the reference: the kernels have not written theirs yet."
        )
        return Shown(attention.attention_weights(weights, dark=dark), told)

    def _split(self, trace: Trace, position: int, row: int, head: int, dark: bool) -> Shown:
        rows = self._rows if self.follow.value and position else range(row, row + 1)
        first = max(0, rows.stop - max(len(rows), ROWS_SHOWN))
        every = [readings.weights(trace, position, n, head) for n in range(first, rows.stop)]
        told = (
            f"Attention of rows {first} to {rows.stop - 1}, head {head}, split between sinks, window, chunk "
            f"and far field. {narration.split_words(every[-1])}"
        )
        return Shown(attention.attention_split(every, dark=dark), told.strip())

    def _gains(self, trace: Trace, position: int, head: int, dark: bool) -> Shown:
        gains = readings.gains(trace, position, head)
        told = f"What each landmark brings to the rows of the chunk, head {head}."
        if np.isfinite(gains.far_share_kernel).any():
            told += f" The largest far share is {np.nanmax(gains.far_share_kernel):.1%}."
        return Shown(far.far_gains(gains, dark=dark), told)

    def _masses(self, trace: Trace, position: int, head: int, dark: bool) -> Shown:
        masses = readings.masses(trace, position, head)
        told = f"Running maxima and masses of the landmarks of head {head}"
        return Shown(far.masses(masses, dark=dark), f"{told}, after {len(masses.rows)} chunks.")

    def _distance(self, trace: Trace, position: int, head: int, dark: bool) -> list[Shown]:
        """Of the heads of the group that is looked at."""
        hpg = int(trace.about["sizes"]["hpg"])
        group = head // hpg
        errors = readings.distances(trace, position)[:, group * hpg : (group + 1) * hpg]
        start = readings.rings(trace, 0)[group]
        first = start.window - start.length - start.far  # row that evicts
        unknown = np.isnan(errors).any(1)
        shown = errors[: int(unknown.argmax()) if unknown.any() else len(errors)]
        if not len(shown):
            return []
        figure = far.approximation_over_rows(shown, window=max(first, 0), dark=dark)
        return [Shown(figure, f"Distance of each row's output from exact attention, heads of group {group}.")]


_PATHS = {"chunk": "chunk", "matrix products": "matmul", "token": "token"}
_VIEWS = (
    ("of the step", ""),
    ("attention of the row", "attention"),
    ("split between the parts", "split"),
    ("far gains", "gains"),
    ("maxima and masses", "masses"),
    ("distance from exact attention", "distance"),
)
BUFFERS = (
    "sc", "fs", "nm", "hd", "gn", "cf", "inv", "pz", "kp", "vp", "no", "part", "fo", "s", "mz", "t_hat",
    "out", "ring_k", "ring_v",
)  # fmt: skip


def _views_of(step: Step | None) -> tuple[str, ...]:
    """What goes with a dispatch, but for those that only prepare: of these the error is shown."""
    writes = set(step.dispatch.writes) if step is not None else set()
    if "out" in writes:
        return "attention", "split"
    if "inv" in writes:
        return "attention", "gains"
    if "fo" in writes:
        return ("gains",)
    if {"s", "mz"} & writes:
        return ("masses",)
    return ("split", "masses") if {"meta", "ring_k"} & writes else ()


def _named(trace: Trace, row: int) -> str:
    texts = trace.about.get("tokens", ())
    return f"Row {row} ‘{texts[row]}’" if row < len(texts) else f"Row {row}"


def _meta(rings: Sequence[readings.Ring], group: int) -> str:
    """``meta`` in words, a line for each group; of very many those around ``group``."""
    first = max(0, min(group - MOST_GROUPS // 2, len(rings) - MOST_GROUPS))
    shown = rings[first : first + MOST_GROUPS]
    lines = [
        f"<tr><th>group&nbsp;{r.group}</th><td>{escape(readings.meta_words(r))}</td></tr>" for r in shown
    ]
    more = "" if len(shown) == len(rings) else f"<div class='dim'>of {len(rings)} groups</div>"
    return f"<table aria-label='meta in words'>{''.join(lines)}</table>{more}"


def _invariants(violated: Sequence[str]) -> str:
    if not violated:
        return "<div class='dim'>✓ length ≤ window, head in range, far count right</div>"
    return "".join(f"<div class='bad' role='alert'>✗ {escape(text)}</div>" for text in violated)


@functools.cache
def _layer() -> data.Layer:
    return data.minilm()


def _text(sizes: Sizes, rows: int) -> tuple[Given, tuple[str, ...]]:
    """The layer of ``data.minilm``: its first tokens as sinks, the others as rows, landmarks made from the
    first half of these; and their texts."""
    layer, ns = _layer(), sizes.ns
    n, heads, _ = layer.k.shape
    if sizes.ng > heads:
        raise ArgumentError(f"{sizes.ng} groups: the text is seen by {heads} heads.")
    if ns + rows > n:
        raise ArgumentError(f"{ns} sinks and {rows} rows: the text has {n} tokens.")
    q, k, v = (x[:, : sizes.ng] for x in (layer.q, layer.k, layer.v))
    prefix = slice(ns, ns + (n - ns) // 2)
    sinks = (np.ascontiguousarray(x[:ns].swapaxes(0, 1)) for x in (k, v))
    state = State.sealed(sizes, k[prefix], q[prefix], *sinks, rcond=RCOND)
    inputs = [mx.array(np.ascontiguousarray(x[ns : ns + rows])) for x in (q, k, v)]
    return (state, inputs[0], inputs[1], inputs[2]), layer.tokens[ns : ns + rows]


def panel(
    session: Session,
    state: State | None = None,
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *,
    sizes: Sizes | None = None,
    rows: int | None = None,
    chunks: int | None = None,
    path: str = "chunk",
    seed: int = 0,
) -> Panel:
    """A stepping panel of ``session``: see ``lab.o1.panel``."""
    if path not in PATHS:
        raise ArgumentError(f"There is no path {path!r}: a chunk takes {', '.join(PATHS)}.")
    own = {"state": state, "q": q, "k": k, "v": v}
    lacking = [name for name, value in own.items() if value is None]
    if lacking and len(lacking) < len(own):
        raise ArgumentError(f"Your own data are state, q, k and v: {' and '.join(lacking)} not given.")
    given: Given | None = None
    if state is not None:
        # What becomes of the user's arrays later does not change what is shown.
        q, k, v = (x if isinstance(x, mx.array) else np.array(x) for x in (q, k, v))
        given = state.copy(), q, k, v
    numbers = {name: getattr(sizes, name) for name in SIZES} if sizes is not None else {}
    numbers |= {name: x for name, x in (("rows", rows), ("chunk", chunks)) if x is not None}
    plain = sizes is None or sizes.scale == sizes.d**-0.5
    return Panel(
        Subject(
            session,
            given,
            numbers=numbers,
            windows=sizes.windows if sizes is not None else None,
            scale=None if plain or sizes is None else sizes.scale,
            path=path,
            seed=seed,
        )
    )
