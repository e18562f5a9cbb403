"""Modules, functions, blocks, global variables and metadata."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from .instructions import Attributes, Call, Instruction, Phi, Terminator, find_attribute
from .types import DataLayout, PointerType, StructType, Type, escaped, quoted
from .values import Constant, Global, Local, Value, typed

__all__ = [
    "Block",
    "DebugLocation",
    "Function",
    "GlobalVariable",
    "MetadataNode",
    "MetadataReference",
    "MetadataValue",
    "Module",
    "Parameter",
]


@dataclass(frozen=True, slots=True)
class Parameter:
    type: Type
    name: str
    attributes: Attributes = ()

    @property
    def value(self) -> Local:
        return Local(self.type, self.name)

    def __str__(self) -> str:
        return " ".join([str(self.type), *map(str, self.attributes), "%" + quoted(self.name)])


@dataclass(frozen=True, eq=False)
class Block:
    """A basic block: phis, then other instructions, the last of which is the terminator."""

    label: str
    instructions: tuple[Instruction, ...]

    @property
    def phis(self) -> tuple[Phi, ...]:
        return tuple(i for i in self.instructions if isinstance(i, Phi))

    @property
    def terminator(self) -> Terminator:
        last = self.instructions[-1]
        assert isinstance(last, Terminator)
        return last

    def __str__(self) -> str:
        return f"{quoted(self.label)}:\n" + "\n".join(f"  {i}" for i in self.instructions)


@dataclass(frozen=True, eq=False)
class Function:
    """A definition, or a declaration if ``blocks`` is empty.

    ``attributes`` holds those of the attribute groups too. ``prefix`` and ``suffix`` are the words before the
    result's attributes (linkage, ``dso_local``, calling convention...) and after the function's attributes
    (``align``, ``comdat``, ...). ``variables`` names the locals that hold the address of a source variable:
    local -> number of its ``DILocalVariable``.
    """

    name: str
    result: Type
    parameters: tuple[Parameter, ...]
    blocks: tuple[Block, ...] = ()
    attributes: Attributes = ()
    groups: tuple[int, ...] = ()
    own_attributes: Attributes = ()
    result_attributes: Attributes = ()
    variadic: bool = False
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    metadata: tuple[tuple[str, int], ...] = ()
    variables: Mapping[str, int] = field(default_factory=dict)
    line: int = 0

    @property
    def is_declaration(self) -> bool:
        return not self.blocks

    @property
    def convergent(self) -> bool:
        return find_attribute(self.attributes, "convergent") is not None

    @property
    def entry(self) -> Block:
        return self.blocks[0]

    @functools.cached_property
    def block(self) -> Mapping[str, Block]:
        """The blocks by label."""
        return {block.label: block for block in self.blocks}

    @property
    def header(self) -> str:
        """The line that declares or begins the function, without the brace."""
        parameters = [str(p).rsplit(" ", 1)[0] if self.is_declaration else str(p) for p in self.parameters]
        listed = ", ".join([*parameters, *(["..."] if self.variadic else [])])
        attached = [f"!{kind} !{node}" for kind, node in self.metadata]
        words = [
            "declare" if self.is_declaration else "define",
            *(attached if self.is_declaration else []),
            *self.prefix,
            *map(str, self.result_attributes),
            str(self.result),
            f"@{quoted(self.name)}({listed})",
            *self._attribute_words(),
            *([] if self.is_declaration else attached),
        ]
        return " ".join(words)

    def _attribute_words(self) -> list[str]:
        # unnamed_addr precedes the attributes, every other suffix follows them
        first = [word for word in self.suffix if word.endswith("unnamed_addr")]
        rest = [word for word in self.suffix if not word.endswith("unnamed_addr")]
        return [*first, *map(str, self.own_attributes), *(f"#{group}" for group in self.groups), *rest]

    def __str__(self) -> str:
        if self.is_declaration:
            return self.header
        return f"{self.header} {{\n" + "\n\n".join(map(str, self.blocks)) + "\n}"


@dataclass(frozen=True, eq=False)
class GlobalVariable:
    """``initializer`` is None for an external one. ``prefix`` holds linkage and the like."""

    name: str
    type: Type
    initializer: Constant | None
    constant: bool
    align: int | None
    address_space: int = 0
    prefix: tuple[str, ...] = ()
    suffix: tuple[str, ...] = ()
    metadata: tuple[tuple[str, int], ...] = ()
    line: int = 0

    @property
    def value(self) -> Global:
        """The operand that is the variable's address."""
        return Global(PointerType(self.address_space), self.name)

    def __str__(self) -> str:
        words = [
            *self.prefix,
            *([f"addrspace({self.address_space})"] if self.address_space else []),
            "constant" if self.constant else "global",
            str(self.type) if self.initializer is None else typed(self.initializer),
        ]
        tail = [*self.suffix, *([f"align {self.align}"] if self.align else [])]
        tail += [f"!{kind} !{node}" for kind, node in self.metadata]
        return f"@{quoted(self.name)} = " + ", ".join([" ".join(words), *tail])


@dataclass(frozen=True, slots=True)
class MetadataReference:
    """``!12``, the number of a node."""

    number: int


@dataclass(frozen=True, slots=True)
class MetadataNode:
    """``kind`` is the name of a specialised node such as ``DILocation``, empty for a tuple.

    A specialised node has ``fields`` by name, a tuple ``operands``; ``text`` is the node as it was written.
    """

    kind: str
    operands: tuple[MetadataValue, ...]
    fields: Mapping[str, MetadataValue]
    distinct: bool
    text: str


MetadataValue = MetadataReference | MetadataNode | Value | str | int | bool | None
"""Strings and the names of enumerators are both ``str``."""


@dataclass(frozen=True, slots=True)
class DebugLocation:
    """A place in the source. ``line`` is 0 for code that belongs to no line.

    ``inlined_at`` is where the function was inlined to, None if it was not.
    """

    file: str
    line: int
    column: int
    function: str
    inlined_at: DebugLocation | None = None

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" + (f":{self.column}" if self.column else "")
        return place if self.inlined_at is None else f"{place} (inlined at {self.inlined_at})"


@dataclass(frozen=True, eq=False)
class Module:
    """A translation unit. ``functions`` and ``globals`` are by name, in the order of the text."""

    layout: DataLayout
    triple: str = ""
    source: str = ""
    types: Mapping[str, StructType] = field(default_factory=dict)
    globals: Mapping[str, GlobalVariable] = field(default_factory=dict)
    functions: Mapping[str, Function] = field(default_factory=dict)
    attribute_groups: Mapping[int, Attributes] = field(default_factory=dict)
    comdats: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[int, MetadataNode] = field(default_factory=dict)
    named_metadata: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def callee(self, call: Call) -> Function | None:
        """The function that ``call`` names, None if it is called through a pointer."""
        return self.functions.get(call.callee.name) if isinstance(call.callee, Global) else None

    def is_convergent(self, call: Call) -> bool:
        """True if the call may not be made dependent on more or fewer conditions."""
        if find_attribute(call.attributes, "convergent") is not None:
            return True
        callee = self.callee(call)
        return callee is not None and callee.convergent

    def location(self, instruction: Instruction) -> DebugLocation | None:
        """Where in the source ``instruction`` comes from, as far as debug information says."""
        return None if instruction.debug is None else self.location_of(instruction.debug)

    def variable(self, function: Function, local: str) -> str | None:
        """Name of the source variable whose address is ``local``, as far as debug information says."""
        node = self.metadata.get(function.variables.get(local, -1))
        name = node.fields.get("name") if node else None
        return name if isinstance(name, str) else None

    def location_of(self, number: int) -> DebugLocation | None:
        """The place that the node ``!number`` describes, None if it is no ``DILocation``."""
        node = self.metadata.get(number)
        if node is None or node.kind != "DILocation":
            return None
        outer = node.fields.get("inlinedAt")
        file, function = self._scope(node.fields.get("scope"))
        return DebugLocation(
            file,
            _int(node.fields.get("line")),
            _int(node.fields.get("column")),
            function,
            self.location_of(outer.number) if isinstance(outer, MetadataReference) else None,
        )

    def _scope(self, scope: MetadataValue) -> tuple[str, str]:
        """File and function of a scope: the innermost file, the function that encloses it."""
        file = ""
        while isinstance(scope, MetadataReference) and (node := self.metadata.get(scope.number)) is not None:
            if not file and isinstance(where := node.fields.get("file"), MetadataReference):
                name = self.metadata[where.number].fields.get("filename")
                file = name if isinstance(name, str) else ""
            if node.kind == "DISubprogram":
                function = node.fields.get("name")
                return file, function if isinstance(function, str) else ""
            scope = node.fields.get("scope")
        return file, ""

    def __str__(self) -> str:
        parts = [
            f'source_filename = "{escaped(self.source.encode())}"',
            f'target datalayout = "{self.layout.text}"',
            f'target triple = "{self.triple}"',
            *(f"%{quoted(name)} = type {kind.body}" for name, kind in self.types.items()),
            *(f"${quoted(name)} = comdat {kind}" for name, kind in self.comdats.items()),
            *map(str, self.globals.values()),
            *map(str, self.functions.values()),
            *(f"attributes #{n} = {{ {' '.join(map(str, g))} }}" for n, g in self.attribute_groups.items()),
            *(
                f"!{name} = !{{{', '.join(f'!{n}' for n in nodes)}}}"
                for name, nodes in self.named_metadata.items()
            ),
            *(f"!{number} = {node.text}" for number, node in self.metadata.items()),
        ]
        return "\n".join(parts) + "\n"


def _int(value: MetadataValue) -> int:
    return value if isinstance(value, int) else 0
