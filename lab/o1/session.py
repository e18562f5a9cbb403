"""Sessions of the o1 system: sequences on any mix of chunks and paths, traces, comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import systems
from ..errors import ArgumentError
from ..systems.arrays import as_array
from ..systems.deviation import Expectation, Expected
from ..systems.plan import OUTPUT, Plan
from ..systems.trace import Step, Trace, compare, recording, unwritten
from . import reference
from .plans import plans, system
from .sizes import Sizes
from .state import LANDMARKS, SINKS, State


class Session(systems.Session):
    """The o1 kernels, as shipped or replaced by name, on one engine: see ``lab.systems.Session``."""

    def __init__(self, engine: str = "auto", *, guarded: bool | None = None) -> None:
        super().__init__(system(), engine, guarded=guarded)

    def run(
        self,
        state: State,
        q: Any,
        k: Any,
        v: Any,
        *,
        chunks: int | Sequence[int] | None = None,
        path: str | Sequence[str] = "chunk",
    ) -> mx.array:
        """Attend to the rows of a sequence, chunk after chunk, and bring ``state`` up to date in place.

        ``q`` [rows][nh][d], ``k`` and ``v`` [rows][ng][d] are taken as float32; ``chunks`` is the rows of a
        chunk or a list of them, ``path`` is ``chunk``, ``matmul`` or ``token``, or a list with one for each
        chunk. Returns ``out``, float32 [rows][nh][d]. Raises ArgumentError before anything runs.
        """
        inputs = _inputs(state.sizes, q, k, v)
        rows = inputs["q"].shape[0]
        arrays = {**state.arrays, **inputs, "out": mx.zeros(inputs["q"].shape)}
        mx.eval(arrays["out"])
        done = 0
        try:
            for plan in plans(state.sizes, rows, chunks, path):
                self.execute(plan, arrays)
                done += plan.rows
        finally:
            state.arrays.update((name, arrays[name]) for name in state.arrays)
            state.remember(inputs["k"][:done], inputs["v"][:done])
        return arrays["out"]

    def trace(
        self,
        state: State,
        q: Any,
        k: Any,
        v: Any,
        *,
        chunks: int | Sequence[int] | None = None,
        path: str | Sequence[str] = "chunk",
    ) -> Trace:
        """Run a sequence as ``run`` does, on a copy of ``state``, and record every dispatch.

        Every deviation from ``lab.o1.reference`` is found in the trace, if the state's tokens are known.
        """
        trace, steps = self.recording(state, q, k, v, chunks=chunks, path=path)
        for _ in steps:
            pass
        return trace

    def recording(
        self,
        state: State,
        q: Any,
        k: Any,
        v: Any,
        *,
        chunks: int | Sequence[int] | None = None,
        path: str | Sequence[str] = "chunk",
    ) -> tuple[Trace, Iterator[Step]]:
        """A trace as ``trace`` makes it, and the iterator that records its steps one by one."""
        inputs = _inputs(state.sizes, q, k, v)
        rows = inputs["q"].shape[0]
        todo = plans(state.sizes, rows, chunks, path)
        about = {
            "sizes": asdict(state.sizes),
            "engine": self.engine,
            "rows": rows,
            "replaced": {name: kernel.source for name, kernel in self.replaced.items()},
        }
        extra, expected = {}, None
        if state.knows_tokens:
            extra = {"past_keys": state.history.keys, "past_values": state.history.values}
            expected = _Reference(state.history)
        trace = Trace(self.system.name, about, extra, expected, explain)
        arrays = {**state.arrays, **inputs}
        if todo:
            arrays["out"] = unwritten(todo[0].buffers["out"])
        return trace, recording(self, todo, arrays, trace)

    def compare(
        self,
        state: State,
        q: Any,
        k: Any,
        v: Any,
        *,
        chunks: int | Sequence[int] | None = None,
        path: str | Sequence[str] = "chunk",
    ) -> list[systems.Compared]:
        """Each replaced kernel beside the shipped one on the same inputs, over a sequence as in ``trace``."""
        return compare(self, self.trace(state, q, k, v, chunks=chunks, path=path))


def load_trace(folder: str | Path) -> Trace:
    """Read a trace that ``trace.save(folder)`` wrote. Raises ArgumentError where there is none."""
    trace = Trace.load(folder, explain=explain)
    if trace.system != "o1":
        raise ArgumentError(f"The trace in {folder} is one of {trace.system}, not of o1.")
    if "past_keys" in trace.extra:
        told = trace.about["sizes"]
        windows = told["windows"] and tuple(told["windows"])
        start = trace.buffers_at(0)
        history = reference.History.fresh(
            Sizes(**{**told, "windows": windows}),
            **{name: start[name] for name in (*LANDMARKS, *SINKS)},
            windows=tuple(int(x) for x in start["meta"][:, 3]),
        )
        past = replace(history, keys=trace.extra["past_keys"], values=trace.extra["past_values"])
        trace.reference = _Reference(past)
    return trace


# ---- what a trace is compared with, and how its elements are called ------------------------------------

# Sums to which every evicted token adds, by buffer and field: each gathers a rounding with each of them.
_GATHERING = {
    ("s", "zc"), ("mz", "z"), ("t_hat", ""), ("hd", "far denominator"), ("fo", "far denominator"),
    ("inv", ""), ("out", ""),
}  # fmt: skip


class _Reference:
    """What the dispatches of a trace should write, for a layer that had ``start``'s tokens before it."""

    def __init__(self, start: reference.History) -> None:
        self._histories = [start]  # before each chunk
        self._inputs: Mapping[str, np.ndarray] = {}

    def __call__(self, trace: Trace, chunk: int) -> Mapping[str, Mapping[str, Expectation]]:
        if not self._inputs:
            versions = trace.versions_at(0)
            self._inputs = {name: trace.store.array(name, versions[name]) for name in "qkv"}
        while len(self._histories) <= chunk:
            _, k, v = self._rows(trace.chunks[len(self._histories) - 1].plan)
            self._histories.append(self._histories[-1].push(k, v))
        plan = trace.chunks[chunk].plan
        before = self._histories[chunk]
        found = reference.expected(before, *self._rows(plan), plan.path)
        growth = 1 + (before.pushed + plan.rows) ** 0.5 / 8
        first = trace[trace.chunks[chunk].first_step]
        return {
            kernel: {name: _placed(first, plan, name, e, growth) for name, e in buffers.items()}
            for kernel, buffers in found.items()
        }

    def _rows(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rows = slice(plan.first, plan.first + plan.rows)
        return self._inputs["q"][rows], self._inputs["k"][rows], self._inputs["v"][rows]


def _placed(first: Step, plan: Plan, name: str, expected: Expectation, growth: float) -> Expectation:
    """``expected`` of the reference for the whole buffer, with what gathers as the state ages."""
    values, defined, magnitude = expected.values, expected.defined, expected.magnitude
    if plan.buffers[name].role == OUTPUT:  # all other rows stay what they were
        rows = slice(plan.first, plan.first + plan.rows)
        whole = first.value_before(name).astype(np.float64)
        whole[rows] = values
        defined = np.concatenate(
            [np.ones_like(whole[: plan.first], bool), defined, np.ones_like(whole[rows.stop :], bool)]
        )
        sizes = np.zeros_like(whole)
        sizes[rows] = magnitude
        values, magnitude = whole, sizes
    for part in plan.buffers[name].fields:
        if (name, part.name) in _GATHERING:
            magnitude = magnitude.copy()
            magnitude[..., part.start : part.stop] *= growth
    return Expected(values, defined, magnitude)


def explain(step: Step, buffer: str, terms: Mapping[str, int]) -> str:
    """What a column or a slot holds, from ``meta`` before the chunk: a sink, a slot of the ring, a row."""
    if "group" not in terms or not terms.keys() & {"column", "slot"}:
        return ""
    length, head, _, window = (int(x) for x in step.value_before("meta")[terms["group"]])
    u: Any = step.dispatch.constants["u"]
    window = window or u["w"]
    if "slot" in terms:
        position = (terms["slot"] - head) % window
        row = (position - length) % window
        if terms["slot"] >= window:
            return "beyond the group's window"
        return f"of chunk row {row}" if row < step.plan.rows else f"logical position {position}"
    position = terms["column"] - u["ns"]
    if position < 0:
        return f"sink {terms['column']}"
    if step.plan.path == "chunk":  # columns start at the oldest token that the row sees
        position += max(0, length + terms["row"] + 1 - window)
    if position < length:
        return f"ring slot {(head + position) % window}"
    row = position - length
    return f"chunk row {row}" if row < step.plan.rows else "empty"


def _inputs(sizes: Sizes, q: Any, k: Any, v: Any) -> dict[str, mx.array]:
    """q [rows][nh][d] and k, v [rows][ng][d] as evaluated float32 arrays."""
    rows = int(np.shape(q)[0]) if np.ndim(q) else 0
    found = {
        "q": as_array("q", q, (rows, sizes.nh, sizes.d)),
        "k": as_array("k", k, (rows, sizes.ng, sizes.d)),
        "v": as_array("v", v, (rows, sizes.ng, sizes.d)),
    }
    mx.eval(*found.values())
    return found
