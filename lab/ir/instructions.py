"""Instructions. ``str`` of one is its LLVM text, metadata included, as LLVM itself prints it.

Every instruction has ``operands``, the values it reads in the order in which they are written, and a
terminator has ``successors``, the labels it can go on to (each named once). Instructions compare by identity:
two equal calls in different places are different instructions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .types import FunctionType, Type, quoted
from .values import IntConstant, Local, Value, typed

__all__ = [
    "Alloca",
    "Argument",
    "AtomicRMW",
    "Attribute",
    "Attributes",
    "Binary",
    "Branch",
    "Call",
    "Cast",
    "CompareExchange",
    "ConditionalBranch",
    "ExtractElement",
    "ExtractValue",
    "FCmp",
    "FNeg",
    "Fence",
    "Freeze",
    "GetElementPtr",
    "ICmp",
    "InsertElement",
    "InsertValue",
    "Instruction",
    "Load",
    "Metadata",
    "Phi",
    "Return",
    "Select",
    "ShuffleVector",
    "Store",
    "Switch",
    "Terminator",
    "Unreachable",
    "find_attribute",
]

Metadata = tuple[tuple[str, int], ...]
"""Attachments: kind without ``!`` and number of the node, as in ``!dbg !12``."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """An attribute of a function, call, parameter or argument.

    ``argument`` is what stands with it: the type of ``byval``, ``sret`` and the like, else text.
    """

    name: str
    argument: Type | str | None
    text: str

    def __str__(self) -> str:
        return self.text


Attributes = tuple[Attribute, ...]


def find_attribute(attributes: Attributes, name: str) -> Attribute | None:
    """The attribute of that name, or None."""
    return next((a for a in attributes if a.name == name), None)


@dataclass(frozen=True, eq=False, kw_only=True)
class Instruction:
    """``name`` is the result's, None if there is none; ``line`` counts in the text of the IR, from 1."""

    type: Type
    name: str | None = None
    metadata: Metadata = ()
    line: int = 0

    @property
    def operands(self) -> tuple[Value, ...]:
        raise NotImplementedError

    @property
    def result(self) -> Local:
        """The operand that names this instruction's result. Raises ValueError if it has none."""
        if self.name is None:
            raise ValueError(f"no result: {self}")
        return Local(self.type, self.name)

    @property
    def debug(self) -> int | None:
        """Number of the ``!dbg`` node."""
        return next((node for kind, node in self.metadata if kind == "dbg"), None)

    def body(self) -> str:
        """The text between the result's name and the metadata."""
        raise NotImplementedError

    def __str__(self) -> str:
        head = "" if self.name is None else f"%{quoted(self.name)} = "
        return head + self.body() + "".join(f", !{kind} !{node}" for kind, node in self.metadata)


@dataclass(frozen=True, eq=False, kw_only=True)
class Binary(Instruction):
    """``add`` to ``xor`` and ``fadd`` to ``frem``; flags as ``nuw``, ``exact``, ``disjoint``, ``fast``."""

    operation: str
    lhs: Value
    rhs: Value
    flags: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.lhs, self.rhs

    def body(self) -> str:
        return f"{_words(self.operation, *self.flags)} {typed(self.lhs)}, {self.rhs}"


@dataclass(frozen=True, eq=False, kw_only=True)
class FNeg(Instruction):
    value: Value
    flags: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.value,)

    def body(self) -> str:
        return f"{_words('fneg', *self.flags)} {typed(self.value)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Freeze(Instruction):
    value: Value

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.value,)

    def body(self) -> str:
        return f"freeze {typed(self.value)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Cast(Instruction):
    """``trunc``, ``zext``, ``fptosi``, ``bitcast`` and so on, to the instruction's type."""

    operation: str
    value: Value
    flags: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.value,)

    def body(self) -> str:
        return f"{_words(self.operation, *self.flags)} {typed(self.value)} to {self.type}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ICmp(Instruction):
    predicate: str
    lhs: Value
    rhs: Value
    flags: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.lhs, self.rhs

    def body(self) -> str:
        return f"{_words('icmp', *self.flags, self.predicate)} {typed(self.lhs)}, {self.rhs}"


@dataclass(frozen=True, eq=False, kw_only=True)
class FCmp(Instruction):
    predicate: str
    lhs: Value
    rhs: Value
    flags: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.lhs, self.rhs

    def body(self) -> str:
        return f"{_words('fcmp', *self.flags, self.predicate)} {typed(self.lhs)}, {self.rhs}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Select(Instruction):
    condition: Value
    then: Value
    otherwise: Value
    flags: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.condition, self.then, self.otherwise

    def body(self) -> str:
        return f"{_words('select', *self.flags)} {', '.join(map(typed, self.operands))}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Phi(Instruction):
    """``incoming``: a value and the label of the block that it comes from."""

    incoming: tuple[tuple[Value, str], ...]
    flags: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return tuple(value for value, _ in self.incoming)

    def body(self) -> str:
        pairs = ", ".join(f"[ {value}, {_label(label)} ]" for value, label in self.incoming)
        return f"{_words('phi', *self.flags)} {self.type} {pairs}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Alloca(Instruction):
    """``count`` is None for a single object."""

    allocated: Type
    align: int
    count: Value | None = None
    address_space: int = 0

    @property
    def operands(self) -> tuple[Value, ...]:
        return () if self.count is None else (self.count,)

    def body(self) -> str:
        count = "" if self.count is None else f", {typed(self.count)}"
        space = f", addrspace({self.address_space})" if self.address_space else ""
        return f"alloca {self.allocated}{count}, align {self.align}{space}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Load(Instruction):
    """``ordering`` is None unless the load is atomic."""

    pointer: Value
    align: int
    volatile: bool = False
    ordering: str | None = None
    scope: str | None = None

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.pointer,)

    def body(self) -> str:
        head = _words("load", "atomic" if self.ordering else "", "volatile" if self.volatile else "")
        tail = f"{_atomic(self.ordering, self.scope)}, align {self.align}"
        return f"{head} {self.type}, {typed(self.pointer)}{tail}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Store(Instruction):
    """``ordering`` is None unless the store is atomic."""

    value: Value
    pointer: Value
    align: int
    volatile: bool = False
    ordering: str | None = None
    scope: str | None = None

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.value, self.pointer

    def body(self) -> str:
        head = _words("store", "atomic" if self.ordering else "", "volatile" if self.volatile else "")
        tail = f"{_atomic(self.ordering, self.scope)}, align {self.align}"
        return f"{head} {typed(self.value)}, {typed(self.pointer)}{tail}"


@dataclass(frozen=True, eq=False, kw_only=True)
class GetElementPtr(Instruction):
    """Address arithmetic over ``source``, the type that ``pointer`` is taken to point to."""

    source: Type
    pointer: Value
    indices: tuple[Value, ...]
    flags: tuple[str, ...] = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.pointer, *self.indices

    def body(self) -> str:
        operands = ", ".join(map(typed, self.operands))
        return f"{_words('getelementptr', *self.flags)} {self.source}, {operands}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ExtractElement(Instruction):
    vector: Value
    index: Value

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.vector, self.index

    def body(self) -> str:
        return f"extractelement {typed(self.vector)}, {typed(self.index)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class InsertElement(Instruction):
    vector: Value
    element: Value
    index: Value

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.vector, self.element, self.index

    def body(self) -> str:
        return f"insertelement {typed(self.vector)}, {typed(self.element)}, {typed(self.index)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ShuffleVector(Instruction):
    """``mask``: for each element of the result its index in ``lhs`` then ``rhs``; None is poison."""

    lhs: Value
    rhs: Value
    mask: tuple[int | None, ...]

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.lhs, self.rhs

    def body(self) -> str:
        if all(lane is None for lane in self.mask):
            mask = "poison"
        elif not any(self.mask) and None not in self.mask:
            mask = "zeroinitializer"
        else:
            mask = f"<{', '.join('i32 poison' if lane is None else f'i32 {lane}' for lane in self.mask)}>"
        return f"shufflevector {typed(self.lhs)}, {typed(self.rhs)}, <{len(self.mask)} x i32> {mask}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ExtractValue(Instruction):
    aggregate: Value
    indices: tuple[int, ...]

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.aggregate,)

    def body(self) -> str:
        return f"extractvalue {typed(self.aggregate)}, {', '.join(map(str, self.indices))}"


@dataclass(frozen=True, eq=False, kw_only=True)
class InsertValue(Instruction):
    aggregate: Value
    element: Value
    indices: tuple[int, ...]

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.aggregate, self.element

    def body(self) -> str:
        indices = ", ".join(map(str, self.indices))
        return f"insertvalue {typed(self.aggregate)}, {typed(self.element)}, {indices}"


@dataclass(frozen=True, eq=False, kw_only=True)
class AtomicRMW(Instruction):
    """``operation``: ``xchg``, ``add``, ``fadd``, ``umin`` and so on."""

    operation: str
    pointer: Value
    value: Value
    ordering: str
    align: int
    volatile: bool = False
    scope: str | None = None

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.pointer, self.value

    def body(self) -> str:
        head = _words("atomicrmw", "volatile" if self.volatile else "", self.operation)
        tail = f"{_atomic(self.ordering, self.scope)}, align {self.align}"
        return f"{head} {typed(self.pointer)}, {typed(self.value)}{tail}"


@dataclass(frozen=True, eq=False, kw_only=True)
class CompareExchange(Instruction):
    """``cmpxchg``; its type is a struct of the old value and i1 for success."""

    pointer: Value
    expected: Value
    replacement: Value
    ordering: str
    failure_ordering: str
    align: int
    weak: bool = False
    volatile: bool = False
    scope: str | None = None

    @property
    def operands(self) -> tuple[Value, ...]:
        return self.pointer, self.expected, self.replacement

    def body(self) -> str:
        head = _words("cmpxchg", "weak" if self.weak else "", "volatile" if self.volatile else "")
        tail = f"{_atomic(self.ordering, self.scope)} {self.failure_ordering}, align {self.align}"
        return f"{head} {', '.join(map(typed, self.operands))}{tail}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Fence(Instruction):
    ordering: str
    scope: str | None = None

    @property
    def operands(self) -> tuple[Value, ...]:
        return ()

    def body(self) -> str:
        return f"fence{_atomic(self.ordering, self.scope)}"


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a call with the attributes given there."""

    value: Value
    attributes: Attributes = ()

    def __str__(self) -> str:
        return _words(str(self.value.type), *map(str, self.attributes), str(self.value))


@dataclass(frozen=True, eq=False, kw_only=True)
class Call(Instruction):
    """``attributes`` are the call's own, those of the groups in ``groups`` included, not its callee's.

    ``tail`` is ``tail``, ``musttail``, ``notail`` or empty; ``signature`` is given for a variadic callee.
    """

    callee: Value
    arguments: tuple[Argument, ...]
    tail: str = ""
    flags: tuple[str, ...] = ()
    convention: str = ""
    result_attributes: Attributes = ()
    signature: FunctionType | None = None
    attributes: Attributes = ()
    groups: tuple[int, ...] = ()
    own_attributes: Attributes = ()

    @property
    def operands(self) -> tuple[Value, ...]:
        return *(a.value for a in self.arguments), self.callee

    def body(self) -> str:
        head = _words(
            self.tail, "call", *self.flags, self.convention, *map(str, self.result_attributes),
            str(self.signature or self.type),
        )  # fmt: skip
        tail = "".join(f" {a}" for a in self.own_attributes) + "".join(f" #{group}" for group in self.groups)
        return f"{head} {self.callee}({', '.join(map(str, self.arguments))}){tail}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Terminator(Instruction):
    """The last instruction of a block."""

    @property
    def successors(self) -> tuple[str, ...]:
        return ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Return(Terminator):
    value: Value | None

    @property
    def operands(self) -> tuple[Value, ...]:
        return () if self.value is None else (self.value,)

    def body(self) -> str:
        return "ret void" if self.value is None else f"ret {typed(self.value)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Branch(Terminator):
    target: str

    @property
    def operands(self) -> tuple[Value, ...]:
        return ()

    @property
    def successors(self) -> tuple[str, ...]:
        return (self.target,)

    def body(self) -> str:
        return f"br label {_label(self.target)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class ConditionalBranch(Terminator):
    condition: Value
    then: str
    otherwise: str

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.condition,)

    @property
    def successors(self) -> tuple[str, ...]:
        return _once((self.then, self.otherwise))

    def body(self) -> str:
        return f"br {typed(self.condition)}, label {_label(self.then)}, label {_label(self.otherwise)}"


@dataclass(frozen=True, eq=False, kw_only=True)
class Switch(Terminator):
    value: Value
    default: str
    cases: tuple[tuple[IntConstant, str], ...]

    @property
    def operands(self) -> tuple[Value, ...]:
        return (self.value,)

    @property
    def successors(self) -> tuple[str, ...]:
        return _once((self.default, *(label for _, label in self.cases)))

    def body(self) -> str:
        cases = "".join(f"    {typed(case)}, label {_label(label)}\n" for case, label in self.cases)
        return f"switch {typed(self.value)}, label {_label(self.default)} [\n{cases}  ]"


@dataclass(frozen=True, eq=False, kw_only=True)
class Unreachable(Terminator):
    @property
    def operands(self) -> tuple[Value, ...]:
        return ()

    def body(self) -> str:
        return "unreachable"


def _label(name: str) -> str:
    return "%" + quoted(name)


def _words(*words: str) -> str:
    return " ".join(word for word in words if word)


def _once(labels: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(labels))


def _atomic(ordering: str | None, scope: str | None) -> str:
    """What stands after the operands of a memory access."""
    return (f' syncscope("{scope}")' if scope else "") + (f" {ordering}" if ordering else "")
