"""A session: the kernels a system runs with, each replaceable by name, and the running of plans."""

from __future__ import annotations

import difflib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..engines import registry
from ..errors import ArgumentError, KernelFault
from ..kernel import Kernel, Library, compile
from .contract import Block, Source, System, refusal
from .plan import SCRATCH, Buffer, Dispatch, Plan

Arrays = dict[str, mx.array]

_Constants = tuple[tuple[str, int], ...]  # macros and their values
_NONE: Mapping[str, int] = {}
_DUMMY_BYTES = 16  # what an empty buffer is bound as: Metal has none, and no kernel reads it


@dataclass(frozen=True)
class Replacement:
    """What ``Session.replace`` did: ``names`` now run from the new source, ``ignored`` are none of the
    system's kernels and were left aside. Iterating gives the names."""

    system: str
    names: tuple[str, ...]
    ignored: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        text = f"{self.system} now runs {', '.join(self.names)} from here."
        if self.ignored:
            be = "is not a kernel" if len(self.ignored) == 1 else "are not kernels"
            text += f" Ignored: {', '.join(self.ignored)}, which {be} of {self.system}."
        return text


class Session:
    """The kernels of a system, as shipped or replaced by name, on one engine.

    A replaced kernel runs in the form that guards memory, so that its mistakes reach no array but those it
    writes; a shipped one runs in place. ``guarded`` True or False says so for all of them.
    """

    def __init__(self, system: System, engine: str = "auto", *, guarded: bool | None = None) -> None:
        self.system = system
        self.engine = registry.engine(engine).name
        self.guarded = guarded
        self._libraries: dict[tuple[Path, _Constants], Library] = {}
        self._shipped: dict[tuple[str, _Constants], tuple[Source, Kernel]] = {}
        self._replaced: dict[str, Kernel] = {}
        self._recompiled: dict[tuple[str, _Constants], Kernel] = {}
        self._prepared: set[tuple[tuple[str, ...], _Constants]] = set()
        self._scratch: Arrays = {}
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called whenever kernels have been replaced or put back."""
        self._watchers.append(changed)

    def unwatch(self, changed: Callable[[], None]) -> None:
        """Call ``changed`` no more."""
        self._watchers.remove(changed)

    # ---- kernels by name -------------------------------------------------------------------------------

    @property
    def replaced(self) -> Mapping[str, Kernel]:
        """The replaced kernels by name."""
        return dict(self._replaced)

    def kernel(self, name: str, defines: Mapping[str, int] = _NONE) -> Kernel:
        """The kernel that runs under ``name`` in plans with these ``defines``, by default in those with none.

        Raises ArgumentError for a name the system does not have, and for a source that defines one of these
        macros as something else; CompileError where it does not compile with them.
        """
        if name not in self._replaced:
            return self.shipped(name, defines)
        if not defines:
            return self._replaced[name]
        key = name, tuple(defines.items())
        if key not in self._recompiled:
            self._recompiled[key] = self._with(self._replaced[name], defines)
        return self._recompiled[key]

    def prepare(self, plan: Plan) -> None:
        """Compile the kernels that ``plan`` runs, where that was not done yet. Raises as ``kernel`` and as
        compiling does: before anything has run."""
        needed = tuple(d.kernel for d in plan.dispatches if not d.host), tuple(plan.defines.items())
        if needed not in self._prepared:
            for name in needed[0]:
                self.kernel(name, plan.defines).describe()
            self._prepared.add(needed)

    def shipped(self, name: str, defines: Mapping[str, int] = _NONE) -> Kernel:
        """The system's own kernel, replaced or not. Raises ArgumentError where there is none."""
        return self._shipped_from(name, defines)[1]

    def source(self, name: str) -> str:
        """The text of the shipped file that has the kernel, in one piece, to be changed and given to
        ``replace`` with ``names=name``."""
        return self._shipped_from(name, _NONE)[0].text()

    def replace(
        self, source: str | Path | Library | Kernel, names: str | Iterable[str] | None = None, **options: Any
    ) -> Replacement:
        """Let kernels of ``source`` take the place of those of the same names, all or none.

        ``source`` is MSL text, the path of a ``.metal`` file, a library or a kernel; ``options`` are those
        of ``lab.compile``. Kernels of files that are read before it (``include``) and shipped ones that it
        includes are left aside. ``names`` takes only some of its kernels, wherever they are written. Kernels
        of other names are ignored, and listed in the result. Raises CompileError, or ArgumentError where
        nothing in ``source`` bears a name of the system's or a kernel does not fit its contract: other
        buffers, types or indices.
        """
        found = self._kernels_of(source, options, written=names is None)
        if names is not None:
            chosen = [names] if isinstance(names, str) else list(names)
            lacking = [name for name in chosen if name not in found]
            if lacking:
                raise ArgumentError(f"There is no kernel '{lacking[0]}' in it: it has {_listed(found)}.")
            found = {name: found[name] for name in chosen}
        mine = {name: kernel for name, kernel in found.items() if name in self.system.contracts}
        if not mine or (names is not None and len(mine) < len(found)):
            raise ArgumentError(self._unknown([name for name in found if name not in mine]))
        refused = [text for kernel in mine.values() if (text := refusal(self.system, kernel.signature))]
        if refused:
            raise ArgumentError("\n".join(refused))
        self._replaced.update(mine)
        self._changed(mine)
        return Replacement(self.system.name, tuple(mine), tuple(name for name in found if name not in mine))

    def restore(self, *names: str) -> tuple[str, ...]:
        """Put shipped kernels back: those named, or all. Returns the names that were replaced before."""
        unknown = [name for name in names if name not in self.system.contracts]
        if unknown:
            raise ArgumentError(self._unknown(unknown))
        back = tuple(name for name in names or tuple(self._replaced) if name in self._replaced)
        for name in back:
            del self._replaced[name]
        self._changed(back)
        return back

    def _changed(self, names: Iterable[str]) -> None:
        """Drop what was recompiled of kernels that had these names, and tell those who watch."""
        gone = set(names)
        self._prepared.clear()
        self._recompiled = {key: kernel for key, kernel in self._recompiled.items() if key[0] not in gone}
        if gone:
            for changed in tuple(self._watchers):
                changed()

    def _kernels_of(
        self, source: str | Path | Library | Kernel, options: Mapping[str, Any], *, written: bool
    ) -> dict[str, Kernel]:
        """The kernels of ``source`` by name; ``written``: only those that are written in it."""
        if isinstance(source, Kernel):
            return {source.name: source}
        if not isinstance(source, Library):
            source = compile(source, **{"engine": self.engine, **options})
        elif options:
            raise ArgumentError(
                f"A library is compiled already: {', '.join(options)} cannot be set any more."
            )
        if not source:
            raise ArgumentError("There is no kernel in the source.")
        if not written:
            return dict(source)
        shipped = {s.path.resolve() for s in self.system.sources}
        program = source.program
        found = {
            name: kernel
            for name, kernel in self._written_in(source).items()
            if program.included_from(kernel.signature) not in shipped
        }
        if not found:
            raise ArgumentError(
                f"There is no kernel in the source: those of the files it includes ({_listed(source)}) are "
                "left as they are."
            )
        return found

    def _shipped_from(self, name: str, defines: Mapping[str, int]) -> tuple[Source, Kernel]:
        key = name, tuple(defines.items())
        if key in self._shipped:
            return self._shipped[key]
        if name not in self.system.contracts:
            raise ArgumentError(self._unknown([name]))
        for source in self.system.sources:
            for of, kernel in self._written_in(self._library(source, defines)).items():
                self._shipped.setdefault((of, key[1]), (source, kernel))
            if key in self._shipped:
                return self._shipped[key]
        raise ArgumentError(f"{self.system.name} ships no kernel '{name}' here: its files are incomplete.")

    def _library(self, source: Source, defines: Mapping[str, int]) -> Library:
        mine = {name: defines[name] for name in source.macros if name in defines}
        key = source.path, tuple(mine.items())
        if key not in self._libraries:
            self._libraries[key] = compile(
                source.path, include=source.include, defines={**source.defines, **mine}, engine=self.engine
            )
        return self._libraries[key]

    def _with(self, kernel: Kernel, defines: Mapping[str, int]) -> Kernel:
        """``kernel`` compiled with ``defines``. Raises ArgumentError where its source defines one of them as
        something else, for then plan and kernel would not speak of the same sizes."""
        library = kernel.library.with_defines(defines)
        found = library.macro_values(defines)
        other = {n: v for n, v in found.items() if _number(v) != defines[n]}
        if other:
            told = " and ".join(f"{n} = {v}" for n, v in other.items())
            sizes = " and ".join(str(defines[n]) for n in other)
            named = ", ".join(f"{n.lower()}={v}" for n, v in other.items())
            plain = all(_number(v) is not None for v in other.values())
            hint = f"use Sizes({named})" if plain else "these have to be plain numbers"
            raise ArgumentError(
                f"The source of {kernel.name} has {told}, where the sizes have {sizes}: {hint}."
            )
        if kernel.name not in library:
            raise ArgumentError(f"The source of {kernel.name} has no such kernel for {_macros(defines)}.")
        return library[kernel.name]

    @staticmethod
    def _written_in(library: Library) -> dict[str, Kernel]:
        """The kernels of a library but for those in files that were read before its source."""
        program = library.program
        before = program.options.include
        return {n: k for n, k in library.items() if program.included_from(k.signature) not in before}

    def _unknown(self, names: list[str]) -> str:
        known = list(self.system.contracts)
        close = difflib.get_close_matches(names[0], known, 1)
        hint = f" Did you mean {close[0]}?" if close else f" It has {', '.join(known)}."
        return f"{self.system.name} has no kernel {_listed(names, 'nor ')}.{hint}"

    # ---- running ---------------------------------------------------------------------------------------

    def execute(self, plan: Plan, arrays: Arrays) -> list[float]:
        """Run all dispatches of ``plan``; the seconds each took.

        ``arrays`` holds the plan's state, input and output buffers; what is written is written into these
        arrays, or, where a kernel runs guarded, replaced in the mapping. Scratch is the session's own. Raises
        KernelFault for a kernel that goes wrong, and for one whose results the system refuses.
        """
        self.prepare(plan)
        bound = {**arrays, **self._scratch_for(plan)}
        seconds = []
        try:
            for dispatch in plan.dispatches:
                started = time.perf_counter()
                bound.update(self.run_dispatch(dispatch, plan, bound, guarded=self.guarded))
                seconds.append(time.perf_counter() - started)
                if refused := self.refused(dispatch, plan, bound):
                    raise KernelFault(refused)
        finally:
            for name, array in bound.items():
                (arrays if name in arrays else self._scratch)[name] = array
        return seconds

    def run_dispatch(
        self,
        dispatch: Dispatch,
        plan: Plan,
        arrays: Mapping[str, mx.array],
        *,
        guarded: bool | None = None,
        kernel: Kernel | None = None,
    ) -> Arrays:
        """Run one dispatch of ``plan``; the arrays it wrote by name: new ones (guarded), or the very arrays.

        Every buffer that the kernel could write is among them, whether by contract or not. ``kernel`` runs in
        place of the session's.
        """
        if dispatch.host:
            return self._run_host(dispatch, plan, arrays, guarded=bool(guarded))
        chosen = kernel or self.kernel(dispatch.kernel, plan.defines)
        if guarded is None:
            guarded = kernel is not None or dispatch.kernel in self._replaced
        given = [self._argument(i, dispatch, arrays) for i in range(len(dispatch.buffers))]
        size: dict[str, Any] = {"threadgroup": dispatch.threadgroup}
        size["grid" if dispatch.grid else "groups"] = dispatch.grid or dispatch.groups
        run = chosen if guarded else chosen.run_
        results = run(*given, **size)
        written = [p.index or 0 for p in chosen.signature.buffers if chosen.signature.writes(p)]
        values = list(results) if len(written) > 1 else [results]
        names = [dispatch.buffers[index] for index in written]
        return {n: v for n, v in zip(names, values, strict=True) if n in arrays and arrays[n].size}

    def refused(self, dispatch: Dispatch, plan: Plan, arrays: Mapping[str, mx.array]) -> str:
        """Why what ``dispatch`` wrote into ``arrays`` cannot be worked with: a sentence, or ""."""
        check = self.system.checks.get(dispatch.kernel)
        if check is None:
            return ""
        return check(dispatch, {n: _shaped(np.asarray(arrays[n]), plan.buffers[n]) for n in dispatch.writes})

    def _argument(self, index: int, dispatch: Dispatch, arrays: Mapping[str, mx.array]) -> Any:
        name = dispatch.buffers[index]
        if name in dispatch.constants:
            value = dispatch.constants[name]
            # Types go by position: a dispatch may have other names than the contract.
            kind = self.system.types[self.system.contracts[dispatch.kernel].buffers[index]]
            return kind.pack(value) if isinstance(kind, Block) and isinstance(value, Mapping) else value
        if name not in arrays:
            raise ArgumentError(f"Dispatch {dispatch.kernel} needs the buffer '{name}', which was not given.")
        array = arrays[name]
        return array if array.size else mx.zeros(_DUMMY_BYTES // array.dtype.size, dtype=array.dtype)

    def _run_host(
        self, dispatch: Dispatch, plan: Plan, arrays: Mapping[str, mx.array], *, guarded: bool
    ) -> Arrays:
        operation = self.system.hosts[dispatch.host]
        on_cpu = self.engine == "cpu"
        views: dict[str, Any] = {}
        for name in dispatch.buffers:
            view = np.asarray(arrays[name]) if on_cpu else arrays[name]
            views[name] = _shaped(view, plan.buffers[name])
            if on_cpu and guarded and name in dispatch.writes:
                views[name] = views[name].copy()
        results = operation(dispatch, views, self.engine)
        if not on_cpu:
            return {name: results[name] for name in dispatch.writes}
        for name in dispatch.writes:
            if results[name] is not views[name]:
                views[name][...] = results[name]
        return {name: mx.array(views[name]) if guarded else arrays[name] for name in dispatch.writes}

    def _scratch_for(self, plan: Plan) -> Arrays:
        """The session's scratch, grown to what ``plan`` needs: flat arrays, of which it uses the start."""
        scratch = {}
        for name, buffer in plan.buffers.items():
            if buffer.role == SCRATCH:
                if name not in self._scratch or self._scratch[name].size < buffer.size:
                    self._scratch[name] = mx.zeros(buffer.size, dtype=getattr(mx, buffer.dtype))
                    mx.eval(self._scratch[name])
                scratch[name] = self._scratch[name]
        return scratch

    def __repr__(self) -> str:
        changed = f", replaced: {', '.join(self._replaced)}" if self._replaced else ""
        return f"<{self.system.name} session on {self.engine}{changed}>"


@dataclass(frozen=True)
class Compared:
    """A replaced kernel beside the shipped one, on the same inputs, over a whole trace.

    ``deviation`` and ``shipped_deviation`` are the largest relative deviations from the reference;
    ``differing`` counts elements (of ``elements``) in which the two differ in any bit; times are in
    seconds, of all its dispatches together.
    """

    kernel: str
    deviation: float
    shipped_deviation: float
    differing: int
    elements: int
    seconds: float
    shipped_seconds: float

    def __str__(self) -> str:
        return (
            f"{self.kernel}: {self.deviation:.1e} from the reference (shipped {self.shipped_deviation:.1e}), "
            f"{self.differing} of {self.elements} defined elements differ, "
            f"{self.seconds * 1e6:.0f} us (shipped {self.shipped_seconds * 1e6:.0f} us)"
        )


def _shaped(array: Any, buffer: Buffer) -> Any:
    """``array`` as the plan has it: scratch may be larger than a chunk needs."""
    return array.reshape(-1)[: buffer.size].reshape(buffer.shape)


def _number(text: str) -> int | None:
    """The value of a plain integer literal of C, also in parentheses; None for anything else."""
    plain = re.fullmatch(r"\(*\s*([+-]?\s*(?:0[xX][0-9a-fA-F]+|[1-9][0-9]*|0))[uUlL]*\s*\)*", text)
    return int(plain[1].replace(" ", ""), 0) if plain else None


def _macros(defines: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in defines.items())


def _listed(names: Iterable[str], joint: str = "") -> str:
    return f", {joint}".join(f"'{name}'" for name in names)
