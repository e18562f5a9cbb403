"""A Metal source that has been read: its kernels with their types, ready for any engine."""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from .. import cache, resources
from ..errors import CompileError, MslError
from . import compiler, constants, layout, toolchain
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
    """How a source is compiled.

    ``defines`` are macros; ``include`` files are read before the source, its folders are searched for what
    the source includes. ``constants`` are values of function constants by name or index.
    """

    defines: Mapping[str, str] = field(default_factory=dict)
    include: tuple[Path, ...] = ()
    math: str = "safe"
    constants: Mapping[str | int, Any] = field(default_factory=dict)


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
    values: Mapping[str, str] = field(default_factory=dict)
    """Function constants that have a value, by name, with an expression for it."""
    unknown: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Those that have none, and the names that have to be given for it."""

    def unit(self, kernel: Signature, *, groups: bool) -> Unit:
        """The text that runs ``kernel``, by whole threadgroups or thread by thread.

        Raises CompileError where an argument's presence depends on a function constant without a value.
        """
        unknown = {name: _without_value(kernel.name, name, roots) for name, roots in self.unknown.items()}
        for p in kernel.parameters:
            if p.role == "absent" and p.attribute in unknown:
                raise CompileError(unknown[p.attribute])
        return running(
            self.preprocessed,
            self.declarations,
            kernel.declaration,
            groups=groups,
            values=self.values,
            unknown=unknown,
        )

    @property
    def function_constants(self) -> tuple[str, ...]:
        """The names of the source's function constants."""
        found = self.declarations.function_constants.values()
        return tuple(c.name for c in found if c.index_at is not None)

    def refuse(self, name: str) -> CompileError | None:
        """Why kernel ``name`` cannot be had, for it uses what is out of scope. None for any other."""
        beyond = self.declarations.beyond.get(name)
        return None if beyond is None else _out_of_scope(*beyond, self.preprocessed, f"kernel '{name}': ")

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
    indices = _constant_indices(found, preprocessed, options)
    values = constants.given(found, indices, options.constants, path.name if path else f"The {label}")
    numbers, warnings = _attempts(found, lambda: describing(preprocessed, found, structs, values), options)
    unknown = _without_values(found, values, numbers)
    declared = found.kernels
    found.kernels = [_indexed(k, numbers.get(f"msl_index_{i}", [])) for i, k in enumerate(found.kernels)]
    present = (numbers.get(f"msl_present_{i}", []) for i in range(len(declared)))
    found.kernels = [
        _with_present(k, flags, preprocessed.text) for k, flags in zip(found.kernels, present, strict=True)
    ]
    _refuse_parameters(found, preprocessed)
    ids = {i: struct.name for i, struct in enumerate(structs)}
    layouts = {
        s.name: layout.struct_layout(s.name, s.fields, numbers[f"msl_struct_{i}"], ids)
        for i, s in enumerate(structs)
    }
    kernels = {}
    for i, declaration in enumerate(found.kernels):
        described = [p for p in declared[i].parameters if p.role in ("buffer", "threadgroup")]
        record = numbers[f"msl_kernel_{i}"]
        types = {
            p.name: layout.parameter_type(record[8 * n : 8 * n + 8], ids, _pointee(p))
            for n, p in enumerate(described)
        }
        _refuse_types(declaration, types, preprocessed)
        place = _place(declaration.token, preprocessed)
        kernels[declaration.name] = Signature(declaration, types, layouts, place)
    warned = (*preprocessed.warnings, *warnings)
    return Program(preprocessed, found, options, kernels, warned, values, unknown)


# What is wrong whatever the address spaces are: then a second attempt is in vain.
_IN_VAIN = re.compile(
    r"undeclared|^expected |^unknown type name|^redefinition|^no (template|type) named|^extraneous|^missing"
)


def _attempts(
    found: Declarations, unit: Callable[[], Unit], options: Options
) -> tuple[dict[str, list[int]], list[Diagnostic]]:
    """What a unit describes itself with: with further edits where the compiler refuses it without.

    Raises CompileError, that of the first attempt.
    """
    try:
        return _describe(unit(), options)
    except CompileError as problem:
        wrong = [d.text for d in problem.diagnostics if d.level == "error"]
        for more in (found.second, found.third):
            if more and not any(map(_IN_VAIN.search, wrong)):
                found.edits += more
                with contextlib.suppress(CompileError):
                    return _describe(unit(), options)
        raise problem from None


def _constant_indices(found: Declarations, preprocessed: Preprocessed, options: Options) -> dict[str, int]:
    """The index of each function constant; where it is no plain number, the compiler says what it is."""
    indices: dict[str, int] = {}
    numbers: dict[str, list[int]] = {}
    for i, (name, constant) in enumerate(found.function_constants.items()):
        if constant.index_at is None:
            continue
        index = constants.integer(preprocessed.text[slice(*constant.index_at)])
        if index is None:
            numbers = numbers or _describe(describing(preprocessed, found, []), options)[0]
            index = numbers[f"msl_number_{i}"][0]
        if not 0 <= index < constants.INDICES:
            last = constants.INDICES - 1
            text = f"function constant index {index} is out of range: Metal has 0 to {last}"
            raise _error(constant.token, text, preprocessed)
        indices[name] = index
    return indices


def _without_values(
    found: Declarations, values: Mapping[str, str], numbers: Mapping[str, list[int]]
) -> dict[str, tuple[str, ...]]:
    """Function constants, and those made from them, without a value: by name, with what has to be given."""
    unknown: dict[str, tuple[str, ...]] = {}
    for i, (name, constant) in enumerate(found.function_constants.items()):
        if constant.index_at is not None:
            if name not in values:
                unknown[name] = (name,)
            continue
        roots = tuple(sorted({root for use in constant.uses for root in unknown.get(use, ())}))
        known = numbers.get(f"msl_known_{i}", [0 if roots else 1]) == [1]
        if not known and roots:
            unknown[name] = roots
    return unknown


def _without_value(kernel: str, name: str, roots: Sequence[str]) -> str:
    what = ", ".join(f"'{root}'" for root in roots)
    needs = f"the function constant {what}" if len(roots) == 1 else f"the function constants {what}"
    through = "" if tuple(roots) == (name,) else f" for '{name}'"
    lacks = "has no value" if len(roots) == 1 else "have no value"
    return (
        f"Kernel '{kernel}' needs {needs}{through}, which {lacks}: "
        f"give {'it one' if len(roots) == 1 else 'them'} with constants={{{roots[0]!r}: ...}}, "
        f"in a cell with -C {roots[0]}=..."
    )


def _with_present(kernel: KernelDeclaration, flags: Sequence[int], text: str) -> KernelDeclaration:
    """``kernel`` without the arguments whose function constant is not set, or has no value (a flag of 2)."""
    following = iter(flags)
    parameters = []
    for p in kernel.parameters:
        if p.present_at is not None:
            flag = next(following)
            name = text[slice(*p.present_at)].strip().split("::")[-1].strip()
            if flag != 1:
                p = replace(p, role="absent", attribute=name, index=None)
        parameters.append(p)
    return replace(kernel, parameters=tuple(parameters)) if flags else kernel


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
    """Refuse a source in which nothing is left to run."""
    if found.out_of_scope and not found.kernels:
        raise _out_of_scope(*found.out_of_scope[0], preprocessed)


def _out_of_scope(token: Token, what: str, preprocessed: Preprocessed, whose: str = "") -> CompileError:
    verb = "is" if what == "ray tracing" else "are"
    text = f"{whose}{what} {verb} out of scope here: the lab runs compute kernels on buffers"
    return _error(token, text, preprocessed, MslError)


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
    """Include files and folders as absolute paths; ``kernels/...`` is found among the shipped ones.

    Raises CompileError naming one that does not exist.
    """
    found = []
    shipped = resources.kernels()
    for path in paths:
        file = Path(path).expanduser()
        if not file.exists() and file.parts[:1] == (shipped.name,):
            file = shipped.joinpath(*file.parts[1:])
        if not file.exists():
            raise CompileError(f"The include file {path} does not exist (looked in {Path.cwd()}).")
        found.append(file.resolve())
    return tuple(found)
