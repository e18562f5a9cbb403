"""Metal source as Python callables: ``compile``, ``Library``, ``Kernel``."""

from __future__ import annotations

import collections
import functools
import hashlib
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from . import arguments
from .arguments import Empty, empty
from .engines import registry
from .engines.protocol import MAX_THREADGROUP_MEMORY, Argument, Description, Executable
from .errors import ArgumentError
from .source.compiler import MATH
from .source.diagnostics import Diagnostic
from .source.preprocess import CELL, macro_values
from .source.program import Options, Program, Signature, include_files, read

__all__ = ["Empty", "Kernel", "Library", "Stats", "compile", "empty"]


@dataclass(frozen=True)
class Stats:
    """What the last call of a kernel took. Times are in seconds; ``compile_seconds`` is 0 once compiled."""

    engine: str
    executor: str
    compile_seconds: float
    run_seconds: float
    from_cache: bool
    threads: int
    threadgroups: int


class Kernel:
    """A Metal kernel as a function of arrays. Compiled when it is first called."""

    def __init__(self, library: Library, signature: Signature) -> None:
        self._library = library
        self.signature = signature
        self._slots = arguments.slots(signature)
        self.stats: Stats | None = None
        """How the last call went; None before the first."""
        self.__name__ = signature.name
        self.__doc__ = _manual(signature)

    @property
    def name(self) -> str:
        """The kernel's name in Metal."""
        return self.signature.name

    @property
    def library(self) -> Library:
        """The library the kernel is from."""
        return self._library

    @property
    def source(self) -> str:
        """The kernel's own lines in the source it came from."""
        return self._library.program.source_of(self.signature)

    @property
    def engine(self) -> str:
        """The engine it runs on."""
        return registry.engine(self._library.engine).name

    @property
    def description(self) -> Description | None:
        """Engine, executor and compile time; None before the kernel is compiled."""
        executable = self._library.executables.get(self.name)
        return None if executable is None else executable.describe()

    def describe(self) -> Description:
        """Engine, executor and compile time; compiles the kernel where that was not done yet."""
        return self._executable().describe()

    def __call__(
        self,
        *args: Any,
        grid: Any = None,
        groups: Any = None,
        threadgroup: Any = None,
        threadgroup_memory: Mapping[int, int] | None = None,
        out: Any = None,
        isolate: bool | None = None,
        **named: Any,
    ) -> Any:
        """Run the kernel; every buffer it writes comes back as a new MLX array.

        Arguments go to buffers in the order of their index, or by name: MLX or NumPy arrays of the
        buffer's dtype, Python numbers, sequences of numbers, mappings or NumPy records for structs, and
        ``lab.empty(shape, dtype)`` for a buffer that is only written. ``out`` gives the written buffers
        apart. ``grid`` is the size in threads, ``groups`` in threadgroups: an int or up to three;
        ``threadgroup`` the threads of a group, by default up to 256. ``threadgroup_memory`` maps the
        index of a ``[[threadgroup(n)]]`` argument to its bytes. ``isolate`` runs the launch in a process
        of its own, whatever the library was compiled for: slower, and nothing of this process in reach.

        Returns the one written buffer, a named tuple of several, or None. Raises ArgumentError before
        anything runs, CompileError at the first call, KernelFault when the kernel goes wrong.
        """
        isolated = self._library.isolate if isolate is None else isolate
        return self._run(
            args, named, grid, groups, threadgroup, threadgroup_memory, out, in_place=False, isolate=isolated
        )

    def run_(
        self,
        *args: Any,
        grid: Any = None,
        groups: Any = None,
        threadgroup: Any = None,
        threadgroup_memory: Mapping[int, int] | None = None,
        **named: Any,
    ) -> Any:
        """Run the kernel on the arguments' own memory: what it writes, it writes into the arrays given.

        For state that lives on, where a copy costs too much. The arrays written must be contiguous MLX or
        NumPy arrays; every array that shares their memory changes with them. No memory guards lie around
        them, so a wrong index may change other arrays; the sizes of arguments are checked as ever.
        Returns the written arrays themselves, as a call returns new ones.
        """
        return self._run(
            args, named, grid, groups, threadgroup, threadgroup_memory, None, in_place=True, isolate=False
        )

    def _run(
        self,
        args: Sequence[Any],
        named: Mapping[str, Any],
        grid: Any,
        groups: Any,
        threadgroup: Any,
        threadgroup_memory: Mapping[int, int] | None,
        out: Any,
        *,
        in_place: bool,
        isolate: bool,
    ) -> Any:
        geometry = arguments.geometry(self.name, grid, groups, threadgroup)
        bound = arguments.bind(self.name, self._slots, args, named, out, in_place=in_place)
        shared = _threadgroup_memory(self.signature, threadgroup_memory or {})
        first = self.name not in self._library.executables
        executable = self._executable()
        started = time.perf_counter()
        results = executable.bind(bound, in_place=in_place).run(geometry, shared, isolate=isolate)
        ended = time.perf_counter()
        about = executable.describe()
        self.stats = Stats(
            about.engine,
            about.executor,
            about.compile_seconds if first else 0.0,
            ended - started,
            about.from_cache,
            geometry.threads,
            geometry.group_count,
        )
        if in_place:
            results = [a.owner[0] if isinstance(a.owner, tuple) else a.owner for a in bound if a.written]
        if not results:
            return None
        return results[0] if len(results) == 1 else self._bundle(bound)(*results)

    def _bundle(self, bound: Sequence[Argument]) -> Any:
        return _named_tuple(self.name, tuple(a.name for a in bound if a.written))

    def _executable(self) -> Executable:
        return self._library.executable(self.name)

    def __repr__(self) -> str:
        return f"<kernel {_call_form(self.signature)}>"


class Library(Mapping[str, Kernel]):
    """The kernels of one Metal source: ``library.axpy``, ``library["axpy"]``, ``library.kernels``."""

    def __init__(self, source: _Source, program: Program) -> None:
        self.program = program
        self.engine = source.engine
        self.name = source.name
        self.isolate = source.isolate
        self._source = source
        self.executables: dict[str, Executable] = {}
        self._lock = threading.Lock()
        self._kernels = {name: Kernel(self, signature) for name, signature in program.kernels.items()}

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        """The kernels by name, in the order of the source."""
        return MappingProxyType(self._kernels)

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """What the compiler warned of when it read the source."""
        return self.program.warnings

    def with_defines(self, defines: Mapping[str, Any]) -> Library:
        """The same source compiled with these macros as well; those it was compiled with stay as they are."""
        options = self._source.options
        more = {**macros(defines), **options.defines}
        return _library(replace(self._source, options=replace(options, defines=more)))

    @property
    def function_constants(self) -> tuple[str, ...]:
        """The names of the source's function constants."""
        return self.program.function_constants

    def with_constants(self, constants: Mapping[str | int, Any]) -> Library:
        """The same source with these values of function constants too, by name or index."""
        options = self._source.options
        more = {**options.constants, **constants}
        return _library(replace(self._source, options=replace(options, constants=more)))

    def macro_values(self, names: Iterable[str]) -> dict[str, str]:
        """What those of ``names`` that are macros at the end of the source stand for, by name."""
        source, options = self._source, self._source.options
        return macro_values(
            list(names), source.text, source.path, defines=options.defines, include=options.include
        )

    def executable(self, kernel: str) -> Executable:
        """The compiled kernel, compiled now if it was not yet."""
        with self._lock:
            if kernel not in self.executables:
                signature = self.program.kernels[kernel]
                self.executables[kernel] = registry.engine(self.engine).compile(self.program, signature)
            return self.executables[kernel]

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._refuse(name)
            raise KeyError(f"{self.name} has no kernel called {name!r}: {_names(self._kernels)}.")
        return self._kernels[name]

    def __getattr__(self, name: str) -> Kernel:
        kernels = self.__dict__.get("_kernels", {})
        if name not in kernels:
            if "program" in self.__dict__:
                self._refuse(name)
            mine = self.__dict__.get("name", "The library")
            raise AttributeError(f"{mine} has no kernel called {name!r}: {_names(kernels)}.")
        return kernels[name]

    def _refuse(self, name: str) -> None:
        """Raise MslError for a kernel of the source that uses what is out of scope."""
        problem = self.program.refuse(name)
        if problem is not None:
            raise problem

    def __iter__(self) -> Iterator[str]:
        return iter(self._kernels)

    def __len__(self) -> int:
        return len(self._kernels)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._kernels]

    def __repr__(self) -> str:
        return f"<Metal library {self.name}: {_names(self._kernels)}>"


def compile(
    source: str | Path,
    *,
    name: str | None = None,
    defines: Mapping[str, Any] | None = None,
    include: str | Path | Sequence[str | Path] = (),
    engine: str = "auto",
    math: str = "safe",
    isolate: bool = False,
    constants: Mapping[str | int, Any] | None = None,
) -> Library:
    """Read Metal source and give its kernels as functions.

    ``source`` is MSL text, or the path of a ``.metal`` file; its ``#include "..."`` finds files beside
    it. ``name`` is how messages call a text. ``defines`` maps macro names to values; ``include`` names
    files that are read before the source, and folders that are searched for what it includes. ``constants``
    maps function constants, by name or index, to their values. ``math`` is ``safe`` (operations as written),
    ``relaxed`` or ``fast``. Kernels are compiled when they are first called. ``isolate`` runs every call of
    them (but ``run_``) in a process of its own.

    Raises CompileError with the line, the column and a caret; ArgumentError for a wrong option.
    """
    text, path = _text_of(source)
    files = include_files([include] if isinstance(include, str | Path) else list(include))
    if math not in MATH:
        raise ArgumentError(f"math= takes {', '.join(MATH)}, not {math!r}.")
    if engine not in registry.NAMES:
        registry.engine(engine)
    called = name or (path.name if path else CELL)
    options = Options(macros(defines or {}), files, math, dict(constants or {}))
    return _library(_Source(text, path, options, name or CELL, called, engine, isolate))


def macros(defines: Mapping[str, Any]) -> dict[str, str]:
    """Macro values as text: True is 1, False is 0, None is empty. Raises ArgumentError for a bad name."""
    result = {}
    for key, value in defines.items():
        if not str(key).replace("_", "a").isalnum() or str(key)[0].isdigit():
            raise ArgumentError(f"A define needs a name of letters, digits and underscores, not {key!r}.")
        text = "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)
        result[str(key)] = " ".join(text.splitlines())  # a macro is one line
    return result


# ---- libraries kept in memory, so that the same cell again costs nothing --------------------------------


@dataclass(frozen=True)
class _Source:
    """All that a library is made from. ``label`` is how messages call a text, ``name`` the library's."""

    text: str
    path: Path | None
    options: Options
    label: str
    name: str
    engine: str
    isolate: bool

    @property
    def key(self) -> Any:
        o = self.options
        defines = tuple(o.defines.items())
        values = tuple((key, repr(value)) for key, value in o.constants.items())
        return self.text, self.path, defines, o.include, o.math, self.engine, self.label, self.isolate, values


def _library(source: _Source) -> Library:
    with _lock:
        found = _libraries.get(source.key)
        if found is not None and _fresh(found):
            _libraries.move_to_end(source.key)
            return found.library
    library = Library(source, read(source.text, source.path, source.options, source.label))
    with _lock:
        _libraries[source.key] = _Kept(library, _stamps(library.program))
        while len(_libraries) > _KEEP:
            _libraries.popitem(last=False)
    return library


@dataclass(frozen=True)
class _Kept:
    library: Library
    stamps: Mapping[Path, str]


_KEEP = 64
_lock = threading.Lock()
_libraries: OrderedDict[Any, _Kept] = collections.OrderedDict()


def _stamps(program: Program) -> dict[Path, str]:
    return {path: _stamp(path) for path in program.preprocessed.paths}


def _stamp(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _fresh(kept: _Kept) -> bool:
    return all(_stamp(path) == stamp for path, stamp in kept.stamps.items())


def _text_of(source: str | Path) -> tuple[str, Path | None]:
    if isinstance(source, str) and ("\n" in source or "{" in source or not source.strip()):
        return source, None
    path = Path(source).expanduser()
    try:
        found = path.is_file()
    except OSError:  # a line of text, too long for a path
        found = False
    if found:
        return path.read_text(encoding="utf-8", errors="replace"), path.resolve()
    if isinstance(source, Path) or path.suffix == ".metal":
        raise ArgumentError(f"There is no file {source} (looked in {Path.cwd()}).")
    return source, None


# ---- words ----------------------------------------------------------------------------------------------


@functools.cache
def _named_tuple(kernel: str, names: tuple[str, ...]) -> Any:
    return namedtuple(f"{kernel}_result", names, rename=True)


def _names(kernels: Mapping[str, Any]) -> str:
    return "it has " + ", ".join(kernels) if kernels else "it has none"


def _call_form(signature: Signature) -> str:
    buffers = ", ".join(f"{p.name}: {signature.types[p.name]}" for p in signature.buffers)
    return f"{signature.name}({buffers})"


def _manual(signature: Signature) -> str:
    lines = [f"Metal kernel ``{signature.name}``.", ""]
    for p in signature.buffers:
        use = "written" if signature.writes(p) else "read"
        lines.append(f"buffer({p.index}) {p.name}: {signature.types[p.name]}, {use}")
    for p in signature.threadgroup_arguments:
        lines.append(f"threadgroup({p.index}) {p.name}: {signature.types[p.name]}")
    if signature.attributes:
        lines.append(f"thread attributes: {', '.join(signature.attributes)}")
    return "\n".join(lines)


def _threadgroup_memory(signature: Signature, given: Mapping[int, int]) -> dict[int, int]:
    if not given and not signature.threadgroup_arguments:
        return {}
    known = {p.index or 0: p.name for p in signature.threadgroup_arguments}
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"Kernel '{signature.name}': threadgroup_memory= takes a mapping of indices to bytes, "
            f"not {given!r}."
        )
    for index in given:
        if index not in known:
            raise ArgumentError(
                f"Kernel '{signature.name}' has no [[threadgroup({index})]] argument: it has "
                + (", ".join(f"threadgroup({i}) '{n}'" for i, n in known.items()) or "none")
                + "."
            )
    lacking = [i for i in known if i not in given]
    if lacking:
        raise ArgumentError(
            f"Kernel '{signature.name}': threadgroup({lacking[0]}) '{known[lacking[0]]}' needs its size in "
            f"bytes, as threadgroup_memory={{{lacking[0]}: bytes}}."
        )
    for index, size in given.items():
        if not isinstance(size, int) or not 0 < size <= MAX_THREADGROUP_MEMORY:
            raise ArgumentError(
                f"Kernel '{signature.name}': threadgroup({index}) '{known[index]}' takes 1 to "
                f"{MAX_THREADGROUP_MEMORY} bytes, not {size!r}."
            )
    return dict(given)
