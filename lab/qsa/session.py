"""Sessions of the QSA system: tokens in any mix of calls and paths, traces, comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import systems
from ..errors import ArgumentError
from ..systems.arrays import as_array
from ..systems.deviation import Expectation
from ..systems.plan import Plan
from ..systems.trace import Chunk, Step, Trace, compare, recording, unwritten
from . import reference
from .cache import Cache, tokens_of
from .plans import GROUP, cells_before, plans, system
from .selection import BLOCK, Selection, selection
from .sizes import Sizes


class Session(systems.Session):
    """The QSA kernels, as shipped or replaced by name, on one engine: see ``lab.systems.Session``."""

    def __init__(self, engine: str = "auto", *, guarded: bool | None = None) -> None:
        super().__init__(system(), engine, guarded=guarded)

    def run(
        self,
        cache: Cache,
        qfull: Any,
        qcur: Any,
        k: Any,
        v: Any,
        *,
        tokens: int | Sequence[int] | None = None,
        path: str | Sequence[str] = "v2",
    ) -> mx.array:
        """Attend to the cells of ``cache`` for some new tokens, whose keys and values are appended to it.

        ``qfull`` [rows][qh][2*qd] (query, then gate), ``qcur`` [rows][qh][qd], ``k`` and ``v``
        [rows][qkv][qd] are taken as float32. ``tokens`` is how many a call takes, 1 to 8, or a list of such
        numbers; ``path`` is ``v1``, ``v2`` or ``v3``, or a list with one for each call. Returns ``xp``,
        float32 [rows][qh][qd].

        Raises ArgumentError before anything runs. KernelFault, also for scores that are NaN, leaves the cache
        with the tokens of the calls before.
        """
        inputs = _inputs(cache.sizes, qfull, qcur, k, v)
        todo = plans(cache.sizes, inputs["qcur"].shape[0], cache.cells, tokens, path)
        for plan in todo:
            self.prepare(plan)
        found = [mx.zeros((0, *inputs["qcur"].shape[1:]))]
        for plan in todo:
            own = _of_call(inputs, plan)
            arrays = {**cache.arrays, **own, "xp": mx.zeros(own["qcur"].shape)}
            mx.eval(arrays["xp"])
            try:
                self.execute(plan, arrays)
            finally:
                cache.arrays.update((name, arrays[name]) for name in cache.arrays)
            cache.remember(own["k"], own["v"])
            found.append(arrays["xp"])
        out = found[1] if len(found) == 2 else mx.concatenate(found)
        mx.eval(out)
        return out

    def trace(
        self,
        cache: Cache,
        qfull: Any,
        qcur: Any,
        k: Any,
        v: Any,
        *,
        tokens: int | Sequence[int] | None = None,
        path: str | Sequence[str] = "v2",
    ) -> Trace:
        """Run tokens as ``run`` does, on a copy of ``cache``, and record every dispatch.

        A chunk of the trace is a call; ``qfull``, ``qcur``, ``k``, ``v`` and ``xp`` are those of the call.
        Every deviation from ``lab.qsa.reference`` is found in the trace: each dispatch is held to what
        follows from the buffers as they were before it.
        """
        trace, steps = self.recording(cache, qfull, qcur, k, v, tokens=tokens, path=path)
        for _ in steps:
            pass
        return trace

    def recording(
        self,
        cache: Cache,
        qfull: Any,
        qcur: Any,
        k: Any,
        v: Any,
        *,
        tokens: int | Sequence[int] | None = None,
        path: str | Sequence[str] = "v2",
    ) -> tuple[Trace, Iterator[Step]]:
        """A trace as ``trace`` makes it, and the iterator that records its steps one by one."""
        inputs = _inputs(cache.sizes, qfull, qcur, k, v)
        rows = inputs["qcur"].shape[0]
        todo = plans(cache.sizes, rows, cache.cells, tokens, path)
        about = {
            "sizes": asdict(cache.sizes),
            "engine": self.engine,
            "rows": rows,
            "cells": cache.cells,
            "replaced": {name: kernel.source for name, kernel in self.replaced.items()},
        }
        trace = Trace(self.system.name, about, {}, _Reference(cache.sizes), explain)
        own = [{**_of_call(inputs, plan), "xp": unwritten(plan.buffers["xp"])} for plan in todo]
        return trace, recording(self, todo, cache.arrays, trace, own)

    def compare(
        self,
        cache: Cache,
        qfull: Any,
        qcur: Any,
        k: Any,
        v: Any,
        *,
        tokens: int | Sequence[int] | None = None,
        path: str | Sequence[str] = "v2",
    ) -> list[systems.Compared]:
        """Each replaced kernel beside the shipped one on the same inputs, over tokens as in ``trace``."""
        return compare(self, self.trace(cache, qfull, qcur, k, v, tokens=tokens, path=path))


def load_trace(folder: str | Path) -> Trace:
    """Read a trace that ``trace.save(folder)`` wrote. Raises ArgumentError where there is none."""
    trace = Trace.load(folder, explain=explain)
    if trace.system != "qsa":
        raise ArgumentError(f"The trace in {folder} is one of {trace.system}, not of qsa.")
    trace.reference = _Reference(Sizes(**trace.about["sizes"]))
    return trace


def output(trace: Trace) -> np.ndarray:
    """``xp`` of all calls of a trace that came to their end: float32 [rows][qh][qd]."""
    sizes = Sizes(**trace.about["sizes"])
    done = [s.value("xp") for s in trace if "xp" in s.dispatch.writes and not s.fault]
    return np.concatenate([np.zeros((0, sizes.qh, sizes.qd), np.float32), *done])


def selections(trace: Trace, call: int) -> tuple[Selection, ...]:
    """How each token of a call selects its cells, by the scores that are in the trace.

    Raises ArgumentError for a call that has none: one that is not in the trace, or ended before them.
    """
    if not 0 <= call < len(trace.chunks):
        raise ArgumentError(f"The trace has {len(trace.chunks)} calls: there is no call {call}.")
    plan = trace.chunks[call].plan
    step = next((s for s in trace if s.chunk == call and "scores" in s.dispatch.writes), None)
    if step is None or "scores" not in step.after or step.fault:
        raise ArgumentError(
            f"Call {call} has no scores to select by: {step.fault if step else 'it ended before'}."
        )
    pos0, budget = cells_before(plan), plan.defines["QBUDGET"]
    return tuple(selection(row, pos0 + t + 1, budget) for t, row in enumerate(step.value("scores")))


# ---- what a trace is compared with, and how its elements are called ------------------------------------


class _Reference:
    """What the dispatches of a trace should write, of a layer of these sizes."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes

    def __call__(self, trace: Trace, chunk: int) -> Mapping[str, Mapping[str, Expectation]]:
        return _OfCall(self._sizes, trace, trace.chunks[chunk])


class _OfCall(Mapping[str, Mapping[str, Expectation]]):
    """By kernel, what the buffers of one call should hold after its dispatches. It is found when it is asked
    for, from what they held before, so the call may still be going on."""

    def __init__(self, sizes: Sizes, trace: Trace, call: Chunk) -> None:
        self._sizes, self._trace, self._call = sizes, trace, call
        self._found: dict[int, Mapping[str, Expectation]] = {}

    def _steps(self) -> Sequence[Step]:
        first = self._call.first_step
        return self._trace[first : first + len(self._call.plan.dispatches)]

    def __getitem__(self, kernel: str) -> Mapping[str, Expectation]:
        steps = [step for step in self._steps() if step.kernel == kernel]
        if not steps:
            raise KeyError(kernel)
        # A kernel that runs on several sets of buffers has several steps.
        return {name: e for step in steps for name, e in self._of(step).items()}

    def _of(self, step: Step) -> Mapping[str, Expectation]:
        if step.number not in self._found:
            plan, names = self._call.plan, set(step.dispatch.buffers) - step.dispatch.constants.keys()
            before = {name: step.value_before(name) for name in names}
            self._found[step.number] = reference.expected(
                before, self._sizes, cells_before(plan), plan.rows, step.kernel
            )
        return self._found[step.number]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(step.kernel for step in self._steps()))

    def __len__(self) -> int:
        return len(list(iter(self)))


def explain(step: Step, buffer: str, terms: Mapping[str, int]) -> str:
    """What the terms of an element do not say by themselves: cells of a block, block and rank of an entry,
    the KV head of a head, ..."""
    pos0 = cells_before(step.plan)
    if "block" in terms:
        return _of_block(pos0 + terms["token"] + 1, terms["block"])
    if "entry" in terms:
        return _of_entry(step, pos0 + terms["token"] + 1, terms["token"], terms["entry"])
    if "cell" in terms:
        group = [f"group of 64 {terms['dimension'] // GROUP}"] if "dimension" in terms else []
        token = terms["cell"] - pos0
        mine = [f"token {token} of the call"] if 0 <= token < step.plan.rows else []
        return ", ".join([*group, *mine])
    if "head" not in terms:
        return ""
    heads = step.plan.defines["QH"] // step.plan.defines["QKV"]
    told = [f"KV head {terms['head'] // heads}"]
    if "chunk" in terms:
        length = step.plan.defines["QCH2" if step.plan.path == "v2" else "QCH"]
        end = min(pos0 + terms["token"] + 1, step.plan.defines["QBUDGET"], length * (terms["chunk"] + 1))
        told.append(f"entries {length * terms['chunk']} to {end - 1}")
    return ", ".join(told)


def _of_block(n_kv: int, block: int) -> str:
    first, last = BLOCK * block, min(BLOCK * block + BLOCK, n_kv) - 1
    if first > last:
        return "without cells"
    cells = f"cell {first}" if first == last else f"cells {first} to {last}"
    return f"{cells}, unfinished" if last - first < BLOCK - 1 else cells


def _of_entry(step: Step, n_kv: int, token: int, entry: int) -> str:
    """The blocks of the cell that is there and of the one that should be, and how good their scores are."""
    budget = step.plan.defines["QBUDGET"]
    if n_kv <= budget:
        return "every cell, in order"
    scores = step.value_before("scores")[token][: -(-n_kv // BLOCK)] + np.float32(0)
    expected = step.expected("ids")

    def told(cell: int) -> str:
        if not 0 <= cell < n_kv:
            return "no cell that the token sees"
        block = cell // BLOCK
        rank = 1 + int((scores > scores[block]).sum() + (scores[:block] == scores[block]).sum())
        return f"block {block}, rank {rank} of {len(scores)}"

    found = int(step.value("ids")[token, entry])
    if expected is None or not expected.defined[token, entry] or int(expected.values[token, entry]) == found:
        return told(found)
    return f"{told(found)}; expected {told(int(expected.values[token, entry]))}"


def _inputs(sizes: Sizes, qfull: Any, qcur: Any, k: Any, v: Any) -> dict[str, mx.array]:
    """qfull [rows][qh][2*qd], qcur [rows][qh][qd], k and v [rows][qkv][qd] as evaluated float32 arrays."""
    rows = int(np.shape(qcur)[0]) if np.ndim(qcur) else 0
    found = {
        "qfull": as_array("qfull", qfull, (rows, sizes.qh, 2 * sizes.qd)),
        "qcur": as_array("qcur", qcur, (rows, sizes.qh, sizes.qd)),
        "k": as_array("k", k, (rows, sizes.qkv, sizes.qd)),
        "v": as_array("v", v, (rows, sizes.qkv, sizes.qd)),
    }
    mx.eval(*found.values())
    tokens_of(sizes, found["k"], found["v"])
    return found


def _of_call(inputs: Mapping[str, mx.array], plan: Plan) -> dict[str, mx.array]:
    """The rows of a call, as arrays of their own."""
    rows = slice(plan.first, plan.first + plan.rows)
    found = {name: mx.contiguous(array[rows]) for name, array in inputs.items()}
    mx.eval(*found.values())
    return found
