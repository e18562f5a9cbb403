"""A trace: every dispatch of a run with what it wrote, and how far that is from the reference.

All buffers are versioned and what did not change is shared, so a trace can be rewound to any point exactly.
It is one record, saved as a manifest and its arrays.
"""

from __future__ import annotations

import functools
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ArgumentError, KernelFault
from .deviation import EPS, Deviation, Distances, Expectation, Expected, bits, elements_of, severity
from .plan import SCRATCH, Buffer, Dispatch, Field, Plan
from .session import Arrays, Compared, Session
from .versions import Pages, Store, Version

FORMAT = 1  # of saved traces


Reference = Callable[["Trace", int], Mapping[str, Mapping[str, Expectation]]]
"""From a trace and the number of one of its chunks to what each kernel's buffers should hold."""

Explain = Callable[["Step", str, Mapping[str, int]], str]
"""Words for an element that its terms alone do not say, such as the slot of a column; "" for none."""


@dataclass(frozen=True)
class Chunk:
    """One chunk of a trace: its plan, and the number of its first step."""

    plan: Plan
    first_step: int


@dataclass(frozen=True)
class Step:
    """One dispatch that was run: what it was and the versions of all buffers before and after it."""

    trace: Trace = field(repr=False)
    number: int
    chunk: int
    dispatch: Dispatch
    seconds: float
    before: Mapping[str, Version] = field(repr=False)
    after: Mapping[str, Version] = field(repr=False)
    replaced: bool = False
    fault: str = ""

    @property
    def kernel(self) -> str:
        """The name of the kernel, or of the host operation."""
        return self.dispatch.kernel

    @property
    def plan(self) -> Plan:
        """The plan it belongs to."""
        return self.trace.chunks[self.chunk].plan

    @property
    def written(self) -> tuple[str, ...]:
        """The buffers it writes by contract, and those it changed against it, in buffer order."""
        names = dict.fromkeys(self.dispatch.buffers)
        return tuple(n for n in names if n in self.dispatch.writes or self._version_changed(n))

    def _version_changed(self, name: str) -> bool:
        return name in self.after and self.after[name] is not self.before.get(name)

    def value(self, buffer: str) -> np.ndarray:
        """The buffer's contents after the dispatch: a new array."""
        return self.trace.store.array(buffer, self._known(self.after, buffer))

    def value_before(self, buffer: str) -> np.ndarray:
        """The buffer's contents before the dispatch: a new array."""
        return self.trace.store.array(buffer, self._known(self.before, buffer))

    def changed(self, buffer: str) -> np.ndarray:
        """Which elements the dispatch changed in any bit: bool, of the buffer's shape."""
        after = self.value(buffer)
        if not self._version_changed(buffer):
            return np.zeros(after.shape, bool)
        return bits(after) != bits(self.value_before(buffer))

    def expected(self, buffer: str) -> Expectation | None:
        """What the reference says of the buffer; None where it says nothing."""
        return self.trace.expected_of(self.chunk).get(self.kernel, {}).get(buffer)

    @functools.cached_property
    def deviations(self) -> tuple[Deviation, ...]:
        """One for each field it defines elements of, and for each buffer it changed against its contract."""
        kept = self.trace.kept_deviations
        return kept[self.number] if kept is not None else tuple(self._deviations())

    @property
    def deviation(self) -> Deviation | None:
        """The worst of ``deviations``, in multiples of its tolerance; None where nothing is compared."""
        return max(self.deviations, key=severity, default=None)

    def describe(self, buffer: str, index: int | Sequence[int]) -> tuple[str, str]:
        """The field of an element and where it is in the system's terms. ``index``: flat, or of each axis."""
        about = self.plan.buffers[buffer]
        place = (
            tuple(int(i) for i in np.unravel_index(index, about.shape))
            if isinstance(index, int)
            else tuple(index)
        )
        part = next((f for f in about.fields if f.start <= place[-1] < f.stop), None)
        if part is None:
            return "", f"element {place}"
        row = int(np.ravel_multi_index((*place[:-1], 0), about.shape)) // about.shape[-1]
        inner = row * (part.stop - part.start) + place[-1] - part.start
        return part.name, self._words(buffer, part, inner)

    def _words(self, buffer: str, part: Field, inner: int) -> str:
        terms = {
            name: int(i) for (name, _), i in zip(part.terms, np.unravel_index(inner, part.shape), strict=True)
        }
        words = ", ".join(f"{name} {i}" for name, i in terms.items())
        more = self.trace.explain(self, buffer, terms) if self.trace.explain else ""
        return f"{words} ({more})" if more else words

    def _deviations(self) -> Iterator[Deviation]:
        if self.fault:
            yield Deviation(self.number, self.kernel, "", fault=self.fault)
            return
        for name in self.written:
            if name not in self.dispatch.writes:
                yield self._compare(name, *self._untouched(name))
                continue
            expected = self.expected(name)
            if expected is not None:
                for part in self.plan.buffers[name].fields:
                    if elements_of(expected.defined, part).any():
                        yield self._compare(name, part, expected)

    def _compare(self, name: str, part: Field, expected: Expectation) -> Deviation:
        about = self.plan.buffers[name]
        found = Distances.of(self.value(name), expected, part)
        worst = found.worst
        length = part.stop - part.start
        outer = np.unravel_index(worst // length, about.shape[:-1]) if about.shape[:-1] else ()
        index = (*map(int, outer), part.start + worst % length)
        return Deviation(
            self.number,
            self.kernel,
            name,
            part.name,
            *found.at(worst),
            found.ulp,
            part.tolerance,
            part.tolerance * EPS * float(expected.magnitude[index]),
            index,
            self._words(name, part, worst),
            found.got[worst].item(),
            found.want[worst].item(),
        )

    def _untouched(self, name: str) -> tuple[Field, Expected]:
        """What is expected of a buffer that the kernel had no business to write: all of it as it was."""
        old = self.value_before(name)
        terms = tuple((f"axis {i}", size) for i, size in enumerate(old.shape))
        everything = Field("", 0, old.shape[-1], terms)
        return everything, Expected(old, np.ones(old.shape, bool), np.zeros(old.shape))

    def _known(self, versions: Mapping[str, Version], buffer: str) -> Version:
        if buffer not in versions:
            raise ArgumentError(f"There is no buffer '{buffer}' in this step: it has {', '.join(versions)}.")
        return versions[buffer]


class Trace(Sequence[Step]):
    """The steps of a run, one for each dispatch, in order.

    ``about`` is what was run (sizes, engine, ...) in JSON's types; ``extra`` are arrays that the reference
    needs besides the buffers. Deviations are computed when they are asked for.
    """

    def __init__(
        self,
        system: str,
        about: Mapping[str, Any],
        extra: Mapping[str, np.ndarray],
        reference: Reference | None = None,
        explain: Explain | None = None,
    ) -> None:
        self.system = system
        self.about = dict(about)
        self.extra = dict(extra)
        self.reference = reference
        self.explain = explain
        self.store = Store()
        self.chunks: list[Chunk] = []
        self.kept_deviations: list[tuple[Deviation, ...]] | None = None
        """Deviations that a loaded trace brought along."""
        self._steps: list[Step] = []
        self._start: Mapping[str, Version] = {}
        self._expected: OrderedDict[int, Mapping[str, Mapping[str, Expectation]]] = OrderedDict()

    # ---- steps and time --------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, number: Any) -> Any:
        return self._steps[number]

    def versions_at(self, position: int) -> Mapping[str, Version]:
        """The versions of all buffers after the first ``position`` dispatches."""
        if not 0 <= position <= len(self):
            raise ArgumentError(f"The trace has {len(self)} dispatches: there is no position {position}.")
        if position < len(self):
            return self._steps[position].before
        return self._steps[-1].after if self._steps else self._start

    def buffers_at(self, position: int) -> dict[str, np.ndarray]:
        """All buffers after the first ``position`` dispatches (0: the start), bit for bit, as new arrays.

        Before a chunk's first dispatch its scratch holds NaN, or the least value of an integer dtype, so
        that what nobody has written shows.
        """
        return {name: self.store.array(name, v) for name, v in self.versions_at(position).items()}

    @property
    def nbytes(self) -> int:
        """Bytes that the contents of all versions take, shared parts once."""
        return self.store.nbytes

    # ---- deviations ------------------------------------------------------------------------------------

    def expected_of(self, chunk: int) -> Mapping[str, Mapping[str, Expectation]]:
        """What the reference says of each kernel's buffers in one chunk; empty without a reference."""
        if self.reference is None:
            return {}
        if chunk not in self._expected:
            self._expected[chunk] = self.reference(self, chunk)
            while len(self._expected) > 4:
                self._expected.popitem(last=False)
        return self._expected[chunk]

    @property
    def deviations(self) -> list[Deviation]:
        """The deviations of all steps in order."""
        return [d for step in self._steps for d in step.deviations]

    def first_deviation(self, tolerance: float | Mapping[str, float] | None = None) -> Deviation | None:
        """The first dispatch's worst deviation beyond ``tolerance``; None where all is as it should be.

        By default each field has its own tolerance, in roundings. ``tolerance`` sets another one, relative to
        the largest expected value: for all buffers, or by buffer name.
        """

        def beyond(d: Deviation) -> bool:
            limit = tolerance.get(d.buffer) if isinstance(tolerance, Mapping) else tolerance
            return d.exceeds if limit is None or d.fault else not d.relative <= float(limit)

        for step in self._steps:
            bad = [d for d in step.deviations if beyond(d)]
            if bad:
                return max(bad, key=severity)
        return None

    def report(self) -> str:
        """A table in words: for each kernel the worst of its deviations over the trace, and its time."""
        lines = [f"{'kernel':16} {'times':>5} {'us each':>9}  worst deviation"]
        by_kernel: dict[str, list[Step]] = {}
        for step in self._steps:
            by_kernel.setdefault(step.kernel, []).append(step)
        for name, steps in by_kernel.items():
            worst = max((s.deviation for s in steps if s.deviation), key=severity, default=None)
            micro = sum(s.seconds for s in steps) / len(steps) * 1e6
            told = "not compared"
            if worst is not None:
                of = f"{worst.field} of {worst.buffer}" if worst.field else worst.buffer
                told = f"{worst.relative:.1e} of the largest in {of}, {worst.roundings:.1f} roundings"
                told += f": beyond {worst.tolerance:.3g}" if worst.exceeds else ""
                told = worst.fault or told
            lines.append(f"{name:16} {len(steps):5} {micro:9.0f}  {told}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        counts = f"{len(self.chunks)} chunks, {len(self)} dispatches, {self.nbytes >> 10} KiB"
        return f"<{self.system} trace: {counts}>"

    # ---- recording -------------------------------------------------------------------------------------

    def start(self, arrays: Mapping[str, mx.array]) -> None:
        """Begin with these buffers."""
        self._start = {name: self.store.add(name, np.asarray(a)) for name, a in arrays.items()}

    def append(
        self,
        dispatch: Dispatch,
        before: Mapping[str, Version],
        results: Mapping[str, mx.array],
        seconds: float,
        *,
        replaced: bool,
        fault: str = "",
    ) -> Mapping[str, Version]:
        """Add the step that ran ``dispatch`` and gave ``results``; the versions after it."""
        after = dict(before)
        for name, array in results.items():
            after[name] = self.store.add(name, np.asarray(array), before.get(name))
        frozen = MappingProxyType(after)
        number, chunk = len(self._steps), len(self.chunks) - 1
        step = Step(self, number, chunk, dispatch, seconds, before, frozen, replaced, fault)
        self._steps.append(step)
        return frozen

    # ---- saving ----------------------------------------------------------------------------------------

    def save(self, folder: str | Path) -> Path:
        """Write the record into ``folder``: ``manifest.json`` and ``arrays.npz``. Returns the folder."""
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, np.ndarray] = {f"extra/{name}": a for name, a in self.extra.items()}
        numbers: dict[str, dict[int, int]] = {}
        kept: dict[str, list[Version]] = {}

        def told(versions: Mapping[str, Version]) -> dict[str, int]:
            for name, v in versions.items():
                known = numbers.setdefault(name, {})
                if id(v) not in known:
                    known[id(v)] = len(known)
                    kept.setdefault(name, []).append(v)
            return {name: numbers[name][id(v)] for name, v in versions.items()}

        position = dict(told(self._start))
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "system": self.system,
            "about": self.about,
            "start": position,
            "chunks": [
                {
                    "path": c.plan.path,
                    "first": c.plan.first,
                    "rows": c.plan.rows,
                    "defines": dict(c.plan.defines),
                    "first_step": c.first_step,
                    "buffers": [asdict(b) for b in c.plan.buffers.values()],
                }
                for c in self.chunks
            ],
            "steps": [
                {
                    "chunk": s.chunk,
                    "dispatch": s.dispatch.as_record(),
                    "seconds": s.seconds,
                    "replaced": s.replaced,
                    "fault": s.fault,
                    "before": told(s.before),
                    "after": {n: i for n, i in told(s.after).items() if s.after[n] is not s.before.get(n)},
                    "deviations": [d.as_record() for d in s.deviations],
                }
                for s in self._steps
            ],
        }
        manifest["versions"] = {
            name: [{"shape": v.shape, "dtype": v.dtype, "pages": len(v.pages)} for v in versions]
            for name, versions in kept.items()
        }
        for name, versions in kept.items():
            arrays[f"numbers/{name}"] = np.concatenate([v.pages for v in versions])
            arrays[f"pages/{name}"] = self.store.pages[name].all_pages()
        (target / "manifest.json").write_text(
            json.dumps(manifest, indent=1, allow_nan=False), encoding="utf-8"
        )
        np.savez_compressed(target / "arrays.npz", **arrays)  # type: ignore[arg-type]
        return target

    @classmethod
    def load(
        cls, folder: str | Path, reference: Reference | None = None, explain: Explain | None = None
    ) -> Trace:
        """Read a saved trace. Raises ArgumentError for a folder without one, or of another format."""
        path = Path(folder) / "manifest.json"
        if not path.is_file():
            raise ArgumentError(f"There is no trace in {folder}: it has no manifest.json.")
        manifest = json.loads(path.read_text(encoding="utf-8"))
        if manifest.get("format") != FORMAT:
            raise ArgumentError(
                f"The trace in {folder} has format {manifest.get('format')}; this version reads {FORMAT}."
            )
        with np.load(Path(folder) / "arrays.npz") as found:
            arrays = dict(found)
        extra = {n.removeprefix("extra/"): a for n, a in arrays.items() if n.startswith("extra/")}
        trace = cls(manifest["system"], manifest["about"], extra, reference, explain)
        kept: dict[str, list[Version]] = {}
        for name, versions in manifest["versions"].items():
            trace.store.pages[name] = Pages([arrays[f"pages/{name}"]])
            cuts = np.cumsum([v["pages"] for v in versions])[:-1]
            parts = np.split(arrays[f"numbers/{name}"], cuts)
            kept[name] = [
                Version(tuple(v["shape"]), v["dtype"], p) for v, p in zip(versions, parts, strict=True)
            ]

        def versions_of(told: Mapping[str, int]) -> dict[str, Version]:
            return {name: kept[name][i] for name, i in told.items()}

        trace._start = versions_of(manifest["start"])
        dispatches = [Dispatch.from_record(s["dispatch"]) for s in manifest["steps"]]
        for number, c in enumerate(manifest["chunks"]):
            mine = tuple(
                d for d, s in zip(dispatches, manifest["steps"], strict=True) if s["chunk"] == number
            )
            buffers = {b["name"]: _buffer_of(b) for b in c["buffers"]}
            plan = Plan(c["path"], c["first"], c["rows"], mine, buffers, c.get("defines", {}))
            trace.chunks.append(Chunk(plan, c["first_step"]))
        trace.kept_deviations = []
        for number, (s, dispatch) in enumerate(zip(manifest["steps"], dispatches, strict=True)):
            before = MappingProxyType(versions_of(s["before"]))
            after = MappingProxyType({**before, **versions_of(s["after"])})
            how = s["seconds"], before, after, s["replaced"], s["fault"]
            trace._steps.append(Step(trace, number, s["chunk"], dispatch, *how))
            trace.kept_deviations.append(tuple(map(Deviation.from_record, s["deviations"])))
        return trace


def recording(
    session: Session,
    plans: Sequence[Plan],
    arrays: Mapping[str, mx.array],
    trace: Trace,
    inputs: Sequence[Mapping[str, mx.array]] | None = None,
) -> Iterator[Step]:
    """Run ``plans`` one after the other from ``arrays``, a dispatch whenever the next step is asked for.

    ``inputs`` are arrays that a plan has for itself, for each plan. The arrays given are left as they were.
    Kernels run in the form that guards memory; one that faults, or whose results the system refuses, ends the
    trace, with the fault in its last step. Raises ArgumentError before anything runs where a replaced kernel
    does not go with a plan.
    """
    for plan in plans:
        session.prepare(plan)
    trace.start(arrays)
    return _steps(session, plans, dict(arrays), trace, inputs or [{}] * len(plans))


def _steps(
    session: Session,
    plans: Sequence[Plan],
    current: Arrays,
    trace: Trace,
    inputs: Sequence[Mapping[str, mx.array]],
) -> Iterator[Step]:
    versions: Mapping[str, Version] = trace.versions_at(0)
    for plan, own in zip(plans, inputs, strict=True):
        trace.chunks.append(Chunk(plan, len(trace)))
        new = {**_unwritten(plan), **own}
        current.update(new)
        fresh = {
            name: trace.store.add(name, np.asarray(array), versions.get(name)) for name, array in new.items()
        }
        versions = MappingProxyType({**versions, **fresh})
        for dispatch in plan.dispatches:
            started = time.perf_counter()
            fault, results = "", {}
            try:
                results = session.run_dispatch(dispatch, plan, current, guarded=True)
            except KernelFault as problem:
                fault = str(problem)
            seconds = time.perf_counter() - started
            fault = fault or session.refused(dispatch, plan, {**current, **results})
            replaced = dispatch.kernel in session.replaced
            versions = trace.append(dispatch, versions, results, seconds, replaced=replaced, fault=fault)
            current.update(results)
            yield trace[-1]
            if fault:
                return


def record(
    session: Session,
    plans: Sequence[Plan],
    arrays: Mapping[str, mx.array],
    trace: Trace,
    inputs: Sequence[Mapping[str, mx.array]] | None = None,
) -> Trace:
    """``recording`` to its end."""
    for _ in recording(session, plans, arrays, trace, inputs):
        pass
    return trace


def compare(session: Session, trace: Trace) -> list[Compared]:
    """Each replaced kernel of ``trace`` beside the shipped one, which is run on the same inputs."""
    by_kernel: dict[str, list[Step]] = {}
    for step in trace:
        if step.replaced and not step.fault:
            by_kernel.setdefault(step.kernel, []).append(step)
    return [_compare_steps(session, name, steps) for name, steps in by_kernel.items()]


def _compare_steps(session: Session, name: str, steps: Sequence[Step]) -> Compared:
    differing = elements = 0
    seconds = shipped_seconds = worst = shipped_worst = 0.0
    for step in steps:
        shipped = session.shipped(name, step.plan.defines)
        reads = [n for n in step.dispatch.buffers if n not in step.dispatch.constants]
        arrays = {n: mx.array(step.value_before(n)) for n in reads}
        mx.eval(*arrays.values())
        started = time.perf_counter()
        results = session.run_dispatch(step.dispatch, step.plan, arrays, guarded=True, kernel=shipped)
        shipped_seconds += time.perf_counter() - started
        seconds += step.seconds
        worst = max([worst, *(d.relative for d in step.deviations)])
        for buffer in step.dispatch.writes:
            got = np.asarray(results[buffer])
            expected = step.expected(buffer)
            defined = expected.defined if expected is not None else np.ones(got.shape, bool)
            differing += int((bits(got) != bits(step.value(buffer)))[defined].sum())
            elements += int(defined.sum())
            for part in step.plan.buffers[buffer].fields if expected is not None else ():
                assert expected is not None
                shipped_worst = max(shipped_worst, float(Distances.of(got, expected, part).relative.max()))
    return Compared(name, worst, shipped_worst, differing, elements, seconds, shipped_seconds)


def _unwritten(plan: Plan) -> Arrays:
    """The scratch of a plan full of what no kernel writes."""
    made = {}
    for name, buffer in plan.buffers.items():
        if buffer.role == SCRATCH:
            made[name] = unwritten(buffer)
    return made


def unwritten(buffer: Buffer) -> mx.array:
    """An array for ``buffer`` that holds NaN, or the least value of an integer dtype."""
    kind = np.dtype(buffer.dtype)
    fill = np.nan if kind.kind == "f" else np.iinfo(kind).min
    return mx.array(np.full(buffer.shape, fill, kind))


def _buffer_of(told: Mapping[str, Any]) -> Buffer:
    fields = tuple(
        Field(**{**f, "terms": tuple((name, size) for name, size in f["terms"])}) for f in told["fields"]
    )
    return Buffer(**{**told, "shape": tuple(told["shape"]), "fields": fields})
