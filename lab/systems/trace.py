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
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..errors import ArgumentError, KernelFault
from .plan import SCRATCH, Buffer, Dispatch, Field, Plan
from .session import Arrays, Compared, Session
from .versions import Pages, Store, Version

FORMAT = 1  # of saved traces
_HUGE = 1e29  # from here on a value stands for minus or plus infinity, and says nothing of the others' size


@dataclass(frozen=True)
class Expected:
    """What a buffer should hold after a dispatch, in arrays of its shape.

    ``values`` (float64, or an integer dtype) count where ``defined`` (bool); elsewhere it may hold anything.
    ``magnitude`` (float64) is what a value is made of, its parts without their signs: a float32 computation
    is right to a small multiple of ``2**-24 * magnitude``. It is 0 where a value has to be met exactly.
    """

    values: np.ndarray
    defined: np.ndarray
    magnitude: np.ndarray


class Expectation(Protocol):
    """What a reference gives for a buffer: an ``Expected``, or anything of the same attributes."""

    @property
    def values(self) -> np.ndarray: ...
    @property
    def defined(self) -> np.ndarray: ...
    @property
    def magnitude(self) -> np.ndarray: ...


Reference = Callable[["Trace", int], Mapping[str, Mapping[str, Expectation]]]
"""From a trace and the number of one of its chunks to what each kernel's buffers should hold."""

Explain = Callable[["Step", str, Mapping[str, int]], str]
"""Words for an element that its terms alone do not say, such as the slot of a column; "" for none."""


@dataclass(frozen=True)
class Deviation:
    """How far one field of a buffer is from what it should hold after a dispatch.

    The worst element has ``value`` where ``expected`` should be, at ``index`` of the buffer and, in the
    system's terms, at ``where``. Of it, ``absolute`` is the distance, ``relative`` the distance as a share of
    the largest expected value of the field, and ``roundings`` the distance in units of what one rounding of
    all that the value is made of comes to; ``tolerance`` is as many of these as are still right, and
    ``explained`` the distance they come to. ``ulp`` is the largest distance of any element in units in the
    last place of float32. ``fault`` is the message of a kernel that did not come to its end.
    """

    step: int
    kernel: str
    buffer: str
    field: str = ""
    absolute: float = 0.0
    relative: float = 0.0
    roundings: float = 0.0
    ulp: float = 0.0
    tolerance: float = 0.0
    explained: float = 0.0
    index: tuple[int, ...] = ()
    where: str = ""
    value: float = 0.0
    expected: float = 0.0
    fault: str = ""

    @property
    def exceeds(self) -> bool:
        """Whether it is more than rounding explains."""
        return self.fault != "" or not self.roundings <= self.tolerance

    def __str__(self) -> str:
        head = f"dispatch {self.step}, {self.kernel}"
        if self.fault:
            return f"{head}: {self.fault}"
        of = f"{self.field} of {self.buffer}" if self.field else self.buffer
        return (
            f"{head}: {of} at {self.where} is {self.value:.9g}, expected {self.expected:.9g} "
            f"(off by {self.absolute:.2g}, {self.relative:.2g} of the largest; "
            f"rounding explains {self.explained:.2g})"
        )


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
        return _bits(after) != _bits(self.value_before(buffer))

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
        return max(self.deviations, key=_severity, default=None)

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
                    if _part(expected.defined, part).any():
                        yield self._compare(name, part, expected)

    def _compare(self, name: str, part: Field, expected: Expectation) -> Deviation:
        about = self.plan.buffers[name]
        found = _Distances.of(self.value(name), expected, part)
        worst = found.worst
        length = part.stop - part.start
        outer = np.unravel_index(worst // length, about.shape[:-1]) if about.shape[:-1] else ()
        return Deviation(
            self.number,
            self.kernel,
            name,
            part.name,
            float(found.absolute[worst]),
            float(found.relative[worst]),
            float(found.roundings[worst]),
            found.ulp,
            part.tolerance,
            part.tolerance * _EPS * float(_part(expected.magnitude, part)[worst]),
            (*map(int, outer), part.start + worst % length),
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
                return max(bad, key=_severity)
        return None

    def report(self) -> str:
        """A table in words: for each kernel the worst of its deviations over the trace, and its time."""
        lines = [f"{'kernel':16} {'times':>5} {'us each':>9}  worst deviation"]
        by_kernel: dict[str, list[Step]] = {}
        for step in self._steps:
            by_kernel.setdefault(step.kernel, []).append(step)
        for name, steps in by_kernel.items():
            worst = max((s.deviation for s in steps if s.deviation), key=_severity, default=None)
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
                    "deviations": [asdict(d) for d in s.deviations],
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
        (target / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
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
            plan = Plan(c["path"], c["first"], c["rows"], mine, buffers)
            trace.chunks.append(Chunk(plan, c["first_step"]))
        trace.kept_deviations = []
        for number, (s, dispatch) in enumerate(zip(manifest["steps"], dispatches, strict=True)):
            before = MappingProxyType(versions_of(s["before"]))
            after = MappingProxyType({**before, **versions_of(s["after"])})
            how = s["seconds"], before, after, s["replaced"], s["fault"]
            trace._steps.append(Step(trace, number, s["chunk"], dispatch, *how))
            told = ({**d, "index": tuple(d["index"])} for d in s["deviations"])
            trace.kept_deviations.append(tuple(Deviation(**d) for d in told))
        return trace


def record(session: Session, plans: Sequence[Plan], arrays: Mapping[str, mx.array], trace: Trace) -> Trace:
    """Run ``plans`` one after the other from ``arrays``, and add every dispatch to ``trace``.

    The arrays given are left as they were. Kernels run in the form that guards memory; one that faults ends
    the trace, with the fault in its last step.
    """
    current: Arrays = dict(arrays)
    trace.start(current)
    versions: Mapping[str, Version] = trace.versions_at(0)
    for plan in plans:
        trace.chunks.append(Chunk(plan, len(trace)))
        current.update(_unwritten(plan))
        fresh = {
            name: trace.store.add(name, np.asarray(current[name]), versions.get(name))
            for name, buffer in plan.buffers.items()
            if buffer.role == SCRATCH
        }
        versions = MappingProxyType({**versions, **fresh})
        for dispatch in plan.dispatches:
            started = time.perf_counter()
            fault, results = "", {}
            try:
                results = session.run_dispatch(dispatch, current, guarded=True, plan=plan)
            except KernelFault as problem:
                fault = str(problem)
            seconds = time.perf_counter() - started
            replaced = dispatch.kernel in session.replaced
            versions = trace.append(dispatch, versions, results, seconds, replaced=replaced, fault=fault)
            if fault:
                return trace
            current.update(results)
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
    shipped = session.shipped(name)
    for step in steps:
        reads = [n for n in step.dispatch.buffers if n not in step.dispatch.constants]
        arrays = {n: mx.array(step.value_before(n)) for n in reads}
        mx.eval(*arrays.values())
        started = time.perf_counter()
        results = session.run_dispatch(step.dispatch, arrays, guarded=True, plan=step.plan, kernel=shipped)
        shipped_seconds += time.perf_counter() - started
        seconds += step.seconds
        worst = max([worst, *(d.relative for d in step.deviations)])
        for buffer in step.dispatch.writes:
            got = np.asarray(results[buffer])
            expected = step.expected(buffer)
            defined = expected.defined if expected is not None else np.ones(got.shape, bool)
            differing += int((_bits(got) != _bits(step.value(buffer)))[defined].sum())
            elements += int(defined.sum())
            for part in step.plan.buffers[buffer].fields if expected is not None else ():
                assert expected is not None
                shipped_worst = max(shipped_worst, float(_Distances.of(got, expected, part).relative.max()))
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


# ---- distances ------------------------------------------------------------------------------------------


def _severity(d: Deviation) -> float:
    """How bad a deviation is: as a multiple of its tolerance, or, where it has none, of one rounding."""
    return float("inf") if d.fault else d.roundings / (d.tolerance or 1.0)


def _part(array: np.ndarray, part: Field) -> np.ndarray:
    """The elements of a field, flat, in the order of its terms."""
    return array[..., part.start : part.stop].reshape(-1)


def _bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


@dataclass(frozen=True)
class _Distances:
    """How far the elements of a field are from what they should be, flat; 0 where they are not defined."""

    got: np.ndarray
    want: np.ndarray
    absolute: np.ndarray
    relative: np.ndarray
    roundings: np.ndarray
    ulp: float

    @classmethod
    def of(cls, array: np.ndarray, expected: Expectation, part: Field) -> _Distances:
        got, want = _part(array, part), _part(expected.values, part)
        defined, magnitude = _part(expected.defined, part), _part(expected.magnitude, part)
        wide, target = got.astype(np.float64), want.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            same = ~defined | (got == want.astype(got.dtype)) | (np.isnan(wide) & np.isnan(target))
            absolute = np.where(same, 0.0, np.abs(wide - target))
            absolute[np.isnan(absolute)] = np.inf
            size = np.abs(target)
            # What stands for an infinity says nothing of the size of the others.
            largest = size[defined & (size < _HUGE)].max(initial=_LEAST)
            relative = absolute / np.where(size < _HUGE, largest, size)
            relative[np.isnan(relative)] = np.inf
            roundings = np.where(same, 0.0, absolute / (magnitude * _EPS))
        ulp = _largest_ulp(got[~same], want[~same])
        return cls(got, want, absolute, relative, roundings, ulp)

    @property
    def worst(self) -> int:
        """The element that is off by the most roundings; of several, by the most."""
        most = np.flatnonzero(self.roundings == self.roundings.max())
        return int(most[self.absolute[most].argmax()])


_EPS = 2.0**-24
_LEAST = 2.0**-149  # of float32's positive values


def _largest_ulp(got: np.ndarray, want: np.ndarray) -> float:
    if not got.size:
        return 0.0
    if got.dtype.kind != "f":
        return float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max())
    with np.errstate(over="ignore"):
        return float(np.abs(_ordered(got.astype(np.float32)) - _ordered(want.astype(np.float32))).max())


def _ordered(values: np.ndarray) -> np.ndarray:
    """float32 as integers in the same order, so that neighbours differ by one: int64."""
    bits = values.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _buffer_of(told: Mapping[str, Any]) -> Buffer:
    fields = tuple(
        Field(**{**f, "terms": tuple((name, size) for name, size in f["terms"])}) for f in told["fields"]
    )
    return Buffer(**{**told, "shape": tuple(told["shape"]), "fields": fields})
