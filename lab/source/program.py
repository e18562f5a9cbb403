"""A Metal source that has been read: its kernels with their types, ready for any engine."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from .. import cache, resources
from ..errors import CompileError, MslError
from . import compiler, layout, toolchain
from .declarations import (
    ADDRESS_SPACES,
    SPECIFIERS,
    THREAD_ATTRIBUTES,
    Declarations,
    KernelDeclaration,
    Parameter,
    StructDeclaration,
)
from .diagnostics import Diagnostic, Place
from .layout import ParameterType, StructLayout
from .parameters import numbered
from .preprocess import CELL, Preprocessed, preprocess
from .scan import scan
from .tokens import Token
from .unit import Unit, describing, running

_READING = ("-Xclang", "-disable-llvm-passes")
_INDICES = 31  # buffer indices a kernel has, and threadgroup indices


@dataclass(frozen=True)
class Options:
    """How a source is compiled. ``defines`` are macros; ``include`` files are read before the source."""

    defines: Mapping[str, str] = field(default_factory=dict)
    include: tuple[Path, ...] = ()
    math: str = "safe"


@dataclass(frozen=True)
class Signature:
    """A kernel as its caller sees it; ``types``: those of buffer and threadgroup parameters, by name."""

    declaration: KernelDeclaration
    types: Mapping[str, ParameterType]
    structs: Mapping[str, StructLayout]
    place: Place | None

    @property
    def name(self) -> str:
        return self.declaration.name

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.declaration.parameters

    @functools.cached_property
    def buffers(self) -> tuple[Parameter, ...]:
        """Buffer parameters in the order of their index."""
        return tuple(sorted((p for p in self.parameters if p.role == "buffer"), key=lambda p: p.index or 0))

    @functools.cached_property
    def threadgroup_arguments(self) -> tuple[Parameter, ...]:
        """``[[threadgroup(n)]]`` parameters in the order of their index."""
        found = (p for p in self.parameters if p.role == "threadgroup")
        return tuple(sorted(found, key=lambda p: p.index or 0))

    @property
    def attributes(self) -> tuple[str, ...]:
        """The thread attributes the kernel takes."""
        return tuple(p.attribute for p in self.parameters if p.role == "thread")

    def writes(self, parameter: Parameter) -> bool:
        """Whether the kernel may write the buffer: a device pointer or reference that is not const."""
        kind = self.types[parameter.name]
        return kind.space == "device" and not kind.const


@dataclass(frozen=True)
class Program:
    """A source after reading: what it declares, and what a unit for one of its kernels is made from."""

    preprocessed: Preprocessed
    declarations: Declarations
    options: Options
    kernels: Mapping[str, Signature]
    warnings: tuple[Diagnostic, ...]

    def unit(self, kernel: Signature, *, groups: bool) -> Unit:
        """The text that runs ``kernel``, by whole threadgroups or thread by thread."""
        return running(self.preprocessed, self.declarations, kernel.declaration, groups=groups)

    def source_of(self, kernel: Signature) -> str:
        """The lines of the user's source that define ``kernel``."""
        declaration = kernel.declaration
        first = _place(declaration.first, self.preprocessed)
        last = _place(declaration.last, self.preprocessed)
        if first is None or last is None:
            return ""
        lines = self.preprocessed.files[first.file].split("\n")
        return "\n".join(lines[first.line - 1 : max(first.line, last.line)])

    def included_from(self, kernel: Signature) -> Path | None:
        """The included file that ``kernel`` is written in; None for the source itself."""
        return self.preprocessed.path_of(kernel.place.file) if kernel.place else None

    def uses(self, kernel: Signature) -> set[str]:
        """Every name that may be used when ``kernel`` runs (more than really are, never fewer)."""
        functions = self.declarations.functions
        base = kernel.declaration.expression.split("<")[0].split("::")[-1].strip()
        seen: set[str] = set()
        waiting = [base, kernel.name, "operator"]  # whose calls bear no name
        while waiting:
            for word in functions.get(waiting.pop(), ()):
                if word not in seen:
                    seen.add(word)
                    waiting.append(word)
        return seen


def read(text: str, path: Path | None = None, options: Options | None = None, label: str = CELL) -> Program:
    """Read Metal source ``text`` (from file ``path``, if it was one). Raises CompileError."""
    options = options or Options()
    preprocessed = preprocess(text, path, defines=options.defines, include=options.include, label=label)
    found = scan(preprocessed.text)
    _refuse_out_of_scope(found, preprocessed)
    _refuse_twins(found, preprocessed)
    for token, text in found.refused:
        raise _error(token, text, preprocessed)
    structs = _structs_of(found)
    unit = describing(preprocessed, found, structs)
    numbers, warnings = _describe(unit, options)
    found.kernels = [_indexed(k, numbers.get(f"msl_index_{i}", [])) for i, k in enumerate(found.kernels)]
    _refuse_parameters(found, preprocessed)
    ids = {i: struct.name for i, struct in enumerate(structs)}
    layouts = {
        s.name: layout.struct_layout(s.name, s.fields, numbers[f"msl_struct_{i}"], ids)
        for i, s in enumerate(structs)
    }
    kernels = {}
    for i, declaration in enumerate(found.kernels):
        described = [p for p in declaration.parameters if p.role in ("buffer", "threadgroup")]
        record = numbers[f"msl_kernel_{i}"]
        types = {
            p.name: layout.parameter_type(record[8 * n : 8 * n + 8], ids, _pointee(p))
            for n, p in enumerate(described)
        }
        _refuse_types(declaration, types, preprocessed)
        place = _place(declaration.token, preprocessed)
        kernels[declaration.name] = Signature(declaration, types, layouts, place)
    return Program(preprocessed, found, options, kernels, (*preprocessed.warnings, *warnings))


def _indexed(kernel: KernelDeclaration, values: Sequence[int]) -> KernelDeclaration:
    """``kernel`` with the ``values`` of those indices that the compiler had to evaluate."""
    following = iter(values)
    known = (p if p.index_at is None else replace(p, index=next(following)) for p in kernel.parameters)
    return replace(kernel, parameters=numbered(known)) if values else kernel


def _describe(unit: Unit, options: Options) -> tuple[dict[str, list[int]], list[Diagnostic]]:
    """The numbers a unit describes itself with, from the cache where it was read before without a warning."""
    target = compiler.host()
    flags = compiler.language_flags(target, options.math)
    name = cache.key("describe", toolchain.version(), compiler.headers_key(), *flags, unit.text) + ".json"
    kept = cache.shared().get(name)
    if kept is not None:
        return json.loads(kept), []
    ir, warnings = compiler.compile_ir(unit, target, options.math, *_READING)
    numbers = layout.numbers(ir)
    if not warnings:
        cache.shared().put(name, json.dumps(numbers).encode())
    return numbers, warnings


def _structs_of(found: Declarations) -> list[StructDeclaration]:
    """The structs that kernel parameters use, and those within them."""
    types = [p.type for k in found.kernels for p in k.parameters]
    words = {word for kind in types for word in kind.replace("*", " ").replace("&", " ").split()}
    words |= {w.rsplit("::", 1)[-1] for w in words}
    chosen: dict[str, StructDeclaration] = {}
    waiting = sorted(words & set(found.structs))
    while waiting:
        name = waiting.pop()
        if name not in chosen and not found.structs[name].words & {"private", "protected"}:
            chosen[name] = found.structs[name]
            waiting += sorted(found.structs[name].words & set(found.structs))
    return list(chosen.values())


def _pointee(p: Parameter) -> str:
    """What the parameter points to, as the source spells it."""
    words = re.split(r"[*&]", p.type)[0].replace("(", "").split()
    return " ".join(w for w in words if w not in ADDRESS_SPACES | SPECIFIERS)


def _place(token: Token, preprocessed: Preprocessed) -> Place | None:
    return preprocessed.origin(token.line, token.column)


def _error(
    token: Token, text: str, preprocessed: Preprocessed, kind: type[CompileError] = CompileError
) -> CompileError:
    place = _place(token, preprocessed)
    line = preprocessed.line_of(place) if place else ""
    ranges = ((place.column, place.column + len(token.text)),) if place else ()
    diagnostic = Diagnostic("error", text, place, ranges, line)
    return kind(diagnostic.render(), [diagnostic])


def _refuse_out_of_scope(found: Declarations, preprocessed: Preprocessed) -> None:
    for token, what in found.out_of_scope:
        text = f"{what} are out of scope here: the lab runs compute kernels on buffers"
        if what == "function constants":
            text = "function constants are not supported: use a macro, which a define sets"
        raise _error(token, text, preprocessed, MslError)


def _refuse_twins(found: Declarations, preprocessed: Preprocessed) -> None:
    seen: dict[str, KernelDeclaration] = {}
    for kernel in found.kernels:
        if kernel.name in seen:
            first = _place(seen[kernel.name].token, preprocessed)
            where = f" (the first is in line {first.line})" if first else ""
            raise _error(kernel.token, f"two kernels are called '{kernel.name}'{where}", preprocessed)
        seen[kernel.name] = kernel


def _refuse_parameters(found: Declarations, preprocessed: Preprocessed) -> None:
    for kernel in found.kernels:
        taken: dict[tuple[str, int], Parameter] = {}
        for p in kernel.parameters:
            if p.role == "unknown":
                raise _error(p.token, _unknown(p, kernel), preprocessed)
            if p.role == "thread":
                _refuse_attribute(p, kernel, preprocessed)
            if p.index is not None:
                if p.index >= _INDICES:
                    known = f"{p.role}(0) to {p.role}({_INDICES - 1})"
                    text = f"{p.role} index {p.index} is out of range: Metal has {known}"
                    raise _error(p.token, text, preprocessed)
                other = taken.setdefault((p.role, p.index), p)
                if other is not p:
                    both = f"'{other.name}' and '{p.name}' of kernel '{kernel.name}'"
                    text = f"{both} both have {p.role}({p.index})"
                    raise _error(p.token, text, preprocessed)


_PLAIN = re.compile(r"(?:const )?(u?(?:int|short|char|long)|half|float|bool)([234]?)(?: const)?")


def _refuse_attribute(p: Parameter, kernel: KernelDeclaration, preprocessed: Preprocessed) -> None:
    """Refuse a thread attribute in a type it does not come in, as far as the type is a plain name."""
    plain = _PLAIN.fullmatch(p.type)
    components = THREAD_ATTRIBUTES[p.attribute]
    if plain and not (plain[1] in ("uint", "ushort") and int(plain[2] or 1) <= components):
        known = "uint or ushort" + (", or a vector of 2 or 3 of them" if components > 1 else "")
        text = f"'{p.name}' of kernel '{kernel.name}' is a {p.type}: [[{p.attribute}]] is a {known}"
        raise _error(p.token, text, preprocessed)


def _unknown(p: Parameter, kernel: KernelDeclaration) -> str:
    whose = f"parameter '{p.name}' of kernel '{kernel.name}'"
    if not p.attribute:
        return (
            f"{whose} is neither a buffer (a device or constant pointer or reference) nor has it an "
            "attribute such as [[thread_position_in_grid]]"
        )
    close = get_close_matches(p.attribute, [*THREAD_ATTRIBUTES, "buffer", "threadgroup"], 1)
    hint = f"; did you mean [[{close[0]}]]?" if close else ""
    return f"{whose} has the attribute [[{p.attribute}]], which kernels do not have{hint}"


def _refuse_types(
    kernel: KernelDeclaration, types: Mapping[str, ParameterType], preprocessed: Preprocessed
) -> None:
    for p in kernel.parameters:
        if p.role != "buffer" or p.name not in types:
            continue
        kind = types[p.name]
        if not kind.indirection or kind.space not in ("device", "constant"):
            text = f"buffer '{p.name}' of kernel '{kernel.name}' must be a pointer or reference"
            raise _error(p.token, f"{text} in device or constant memory", preprocessed)


def include_files(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Include files as absolute paths; ``kernels/...`` is found among the shipped ones from any folder.

    Raises CompileError naming one that does not exist.
    """
    found = []
    shipped = resources.kernels()
    for path in paths:
        file = Path(path).expanduser()
        if not file.is_file() and file.parts[:1] == (shipped.name,):
            file = shipped.joinpath(*file.parts[1:])
        if not file.is_file():
            raise CompileError(f"The include file {path} does not exist (looked in {Path.cwd()}).")
        found.append(file.resolve())
    return tuple(found)
