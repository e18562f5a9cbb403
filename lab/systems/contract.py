"""What a kernel must look like to take its place in a system, and what differs where it does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..source.layout import Field, ParameterType, StructLayout
from ..source.program import Signature
from .plan import Dispatch, Triple

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)".*$', re.M)
_SCALARS = {"float32": "float", "uint32": "uint", "int32": "int", "float16": "half", "int8": "char"}
_SAME: Mapping[str, str] = {}


@dataclass(frozen=True)
class Block:
    """A struct of numbers that a kernel takes by reference, such as a parameter block.

    ``words`` are the names and dtypes of its members in order, without padding between them.
    """

    name: str
    words: tuple[tuple[str, str], ...]

    @property
    def dtype(self) -> np.dtype:
        """The NumPy record of it."""
        return np.dtype([(name, kind) for name, kind in self.words])

    def pack(self, values: Mapping[str, Any]) -> bytes:
        """Its bytes; members that ``values`` leaves out are 0."""
        return np.array(tuple(values.get(name, 0) for name, _ in self.words), self.dtype).tobytes()


@dataclass(frozen=True)
class Scalar:
    """A number that a kernel takes by reference: NumPy's name of its dtype."""

    dtype: str


@dataclass(frozen=True)
class Contract:
    """A kernel of a system: its buffers in the order of their index, and those of them that it writes.

    A kernel that is dispatched on several sets of buffers has names of its own here: a dispatch gives others.
    """

    kernel: str
    buffers: tuple[str, ...]
    writes: tuple[str, ...]

    def dispatch(
        self,
        constants: Mapping[str, Any],
        *,
        grid: Triple | None = None,
        groups: Triple | None = None,
        threadgroup: Triple = (1, 1, 1),
        names: Mapping[str, str] = _SAME,
    ) -> Dispatch:
        """A dispatch of the kernel; of ``constants`` those that it takes. ``names`` are the names of buffers
        that are bound under another than the contract's."""
        mine = {name: value for name, value in constants.items() if name in self.buffers}
        buffers, writes = (
            tuple(names.get(name, name) for name in these) for these in (self.buffers, self.writes)
        )
        return Dispatch(self.kernel, buffers, writes, groups, grid, threadgroup, mine)


@dataclass(frozen=True)
class Source:
    """A shipped Metal file, and how it is compiled. ``macros`` are those of a plan's that it depends on."""

    path: Path
    include: tuple[Path, ...] = ()
    defines: Mapping[str, Any] = field(default_factory=dict)
    macros: tuple[str, ...] = ()

    def text(self) -> str:
        """Its text as one piece: what it includes by ``#include "..."`` stands in the place of that line."""
        seen: set[Path] = set()

        def read(path: Path) -> str:
            if path in seen:
                return ""
            seen.add(path)
            text = path.read_text(encoding="utf-8")
            return _INCLUDE.sub(lambda line: read((path.parent / line[1]).resolve()), text)

        return "".join(read(path.resolve()) for path in (*self.include, self.path))


Host = Callable[[Dispatch, Mapping[str, Any], str], Mapping[str, Any]]
"""A host operation: from a dispatch, its arrays and the engine's name to the arrays it writes. On the CPU
engine arrays are NumPy views, and what it writes it may write in place."""


Check = Callable[[Dispatch, Mapping[str, np.ndarray]], str]
"""What the host refuses in what a dispatch wrote: from the dispatch and its arrays, in the plan's shapes, to
a sentence, "" where there is nothing."""

Type = str | Scalar | Block
"""What a buffer holds: NumPy's name of its dtype; or the number or the block that a kernel takes."""


@dataclass(frozen=True)
class System:
    """A system of kernels: contracts by kernel name, the type of each of their buffers, host operations, and
    checks of what a kernel wrote, by its name."""

    name: str
    sources: tuple[Source, ...]
    contracts: Mapping[str, Contract]
    types: Mapping[str, Type]
    hosts: Mapping[str, Host] = field(default_factory=dict)
    checks: Mapping[str, Check] = field(default_factory=dict)


def refusal(system: System, signature: Signature) -> str:
    """Why a kernel cannot take the place of its name's in ``system``: two sentences, or "" where it can.

    Parameter names do not matter, nor whether float32 arrays are read as ``float`` or ``float4``.
    """
    contract = system.contracts[signature.name]
    found = _differences(system, contract, signature)
    if not found:
        return ""
    shown = "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else "")
    wanted = ", ".join(f"{i} {_wanted(system, contract, name)}" for i, name in enumerate(contract.buffers))
    return (
        f"Kernel '{signature.name}' does not fit {system.name}: {shown}. "
        f"Its buffers in {system.name} are {wanted}."
    )


def _wanted(system: System, contract: Contract, name: str) -> str:
    kind = system.types[name]
    written = name in contract.writes
    if isinstance(kind, Block):
        return f"constant {kind.name}& {name}"
    if isinstance(kind, Scalar):
        return f"constant {_SCALARS.get(kind.dtype, kind.dtype)}& {name}"
    return f"device {'' if written else 'const '}{_SCALARS.get(kind, kind)}* {name}"


def _differences(system: System, contract: Contract, signature: Signature) -> list[str]:
    given = {p.index or 0: p for p in signature.buffers}
    found = []
    for index, name in enumerate(contract.buffers):
        if index not in given:
            found.append(f"it has no buffer({index}), where '{name}' is bound")
    for index, p in given.items():
        where = f"buffer({index}) '{p.name}'"
        kind = signature.types[p.name]
        if index >= len(contract.buffers):
            found.append(f"{where} has nothing to be bound to")
            continue
        name = contract.buffers[index]
        called = f"'{name}'" if p.name != name else "it"
        differs = _type_difference(system.types[name], kind, signature.structs)
        if differs:
            found.append(f"{where} is {kind}, but {called} {differs}")
        elif name in contract.writes and not signature.writes(p):
            found.append(f"{where} is {kind}, but {called} is written")
    if not found:
        found += _permuted(contract, signature)
    for p in signature.threadgroup_arguments:
        found.append(f"threadgroup({p.index}) '{p.name}' would need a size, which the plans do not give")
    return found


def _type_difference(wanted: Type, kind: ParameterType, structs: Mapping[str, StructLayout]) -> str:
    element = kind.element
    if isinstance(wanted, Scalar):
        alone = not element.struct and element.count == element.components == element.columns == 1
        fits = alone and element.dtype == wanted.dtype
        return "" if fits else f"is a {_SCALARS.get(wanted.dtype, wanted.dtype)}"
    if isinstance(wanted, Block):
        if element.size * element.count != wanted.dtype.itemsize:
            return (
                f"is {wanted.name} of {wanted.dtype.itemsize} bytes and this {element} has "
                f"{element.size * element.count}"
            )
        layout = structs.get(element.struct)
        return _block_difference(wanted, layout) if layout is not None else ""
    if element.struct or element.scalar in ("?", "void") or element.dtype != wanted:
        return f"holds {wanted}"
    return ""


def _block_difference(wanted: Block, layout: StructLayout) -> str:
    mine = {f.offset: f for f in _flat(layout)}
    fields: Mapping[str, Any] = wanted.dtype.fields or {}
    names = {f.name for f in mine.values()}
    for position, (name, dtype) in enumerate(wanted.words):
        offset = fields[name][1]
        other = mine.get(offset)
        if other is None:
            continue  # within an array or a struct of the same size: not looked into
        if other.element.dtype != dtype:
            scalar = _SCALARS.get(dtype, dtype)
            return f"has {scalar} {name} in word {position}, not {other.element} {other.name}"
        if names == set(fields) and other.name != name:
            return f"has {name} in word {position}, not {other.name}"
    return ""


def _flat(layout: StructLayout) -> list[Field]:
    return [f for f in layout.fields if not f.element.struct and f.element.count == f.element.components == 1]


def _permuted(contract: Contract, signature: Signature) -> list[str]:
    """Buffers of the system's own names at each other's index: every type fits and nothing else would."""
    names = [p.name for p in signature.buffers]
    if sorted(names) != sorted(contract.buffers):
        return []
    return [
        f"buffer({index}) is '{name}', where '{contract.buffers[index]}' is bound"
        for index, name in enumerate(names)
        if name != contract.buffers[index]
    ]
