"""Operands: names of values and constants. Each has a ``type``; ``str`` gives its LLVM text without it."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from .types import (
    ArrayType,
    FloatType,
    IntType,
    MetadataType,
    StructType,
    Type,
    VectorType,
    escaped,
    quoted,
)

__all__ = [
    "Aggregate",
    "Bytes",
    "Constant",
    "Expression",
    "FloatConstant",
    "Global",
    "IntConstant",
    "Local",
    "MetadataOperand",
    "NullPointer",
    "Poison",
    "Splat",
    "Undef",
    "Value",
    "Zero",
    "typed",
]


@dataclass(frozen=True, slots=True)
class Local:
    """A parameter or the result of an instruction, by its name without ``%``."""

    type: Type
    name: str

    def __str__(self) -> str:
        return "%" + quoted(self.name)


@dataclass(frozen=True, slots=True)
class Global:
    """The address of a global variable or function, by its name without ``@``."""

    type: Type
    name: str

    def __str__(self) -> str:
        return "@" + quoted(self.name)


@dataclass(frozen=True, slots=True)
class IntConstant:
    """``value`` is signed, as LLVM prints it; an ``i1`` is 0 or 1."""

    type: IntType
    value: int

    @property
    def unsigned(self) -> int:
        return self.value & ((1 << self.type.bits) - 1)

    def __str__(self) -> str:
        if self.type.bits == 1:
            return "true" if self.value else "false"
        return str(self.value)


@dataclass(frozen=True, slots=True)
class FloatConstant:
    """``bits`` is the value's pattern in its own format, so that every NaN is kept."""

    type: FloatType
    bits: int

    def __str__(self) -> str:
        match self.type.kind:
            case "half":
                return f"0xH{self.bits:04X}"
            case "bfloat":
                return f"0xR{self.bits:04X}"
        wide = self.bits if self.type.kind == "double" else widen_float_bits(self.bits)
        (value,) = struct.unpack("<d", wide.to_bytes(8, "little"))
        text = f"{value:.6e}"
        return text if math.isfinite(value) and float(text) == value else f"0x{wide:016X}"


@dataclass(frozen=True, slots=True)
class NullPointer:
    type: Type

    def __str__(self) -> str:
        return "null"


@dataclass(frozen=True, slots=True)
class Undef:
    type: Type

    def __str__(self) -> str:
        return "undef"


@dataclass(frozen=True, slots=True)
class Poison:
    type: Type

    def __str__(self) -> str:
        return "poison"


@dataclass(frozen=True, slots=True)
class Zero:
    """``zeroinitializer`` of an array, vector or struct."""

    type: Type

    def __str__(self) -> str:
        return "zeroinitializer"


@dataclass(frozen=True, slots=True)
class Aggregate:
    """A vector, array or struct constant, element by element."""

    type: VectorType | ArrayType | StructType
    elements: tuple[Constant, ...]

    def __str__(self) -> str:
        inner = ", ".join(map(typed, self.elements))
        match self.type:
            case VectorType():
                return f"<{inner}>"
            case ArrayType():
                return f"[{inner}]"
            case _:
                body = f"{{ {inner} }}" if inner else "{}"
                return f"<{body}>" if self.type.packed else body


@dataclass(frozen=True, slots=True)
class Bytes:
    """``c"..."``: an array of i8."""

    type: ArrayType
    data: bytes

    def __str__(self) -> str:
        return f'c"{escaped(self.data)}"'


@dataclass(frozen=True, slots=True)
class Splat:
    """A vector constant whose elements are all ``element``."""

    type: VectorType
    element: Constant

    def __str__(self) -> str:
        return f"splat ({typed(self.element)})"


@dataclass(frozen=True, slots=True)
class Expression:
    """A constant expression: ``getelementptr`` over ``source``, a cast, or add, sub, xor of two operands."""

    type: Type
    operation: str
    operands: tuple[Constant, ...]
    flags: tuple[str, ...] = ()
    source: Type | None = None

    def __str__(self) -> str:
        head = " ".join((self.operation, *self.flags))
        operands = ", ".join(map(typed, self.operands))
        if self.operation == "getelementptr":
            return f"{head} ({self.source}, {operands})"
        if len(self.operands) == 1:
            return f"{head} ({operands} to {self.type})"
        return f"{head} ({operands})"


@dataclass(frozen=True, slots=True)
class MetadataOperand:
    """A metadata argument of an intrinsic call, as text."""

    type: MetadataType
    text: str

    def __str__(self) -> str:
        return self.text


Constant = (
    Global
    | IntConstant
    | FloatConstant
    | NullPointer
    | Undef
    | Poison
    | Zero
    | Aggregate
    | Bytes
    | Splat
    | Expression
)
Value = Local | Constant | MetadataOperand


def typed(value: Value) -> str:
    """The value with its type before it, as an operand is usually written."""
    return f"{value.type} {value}"


def widen_float_bits(bits: int) -> int:
    """A float's pattern as that of the double of the same value; LLVM writes float constants so."""
    sign, exponent, fraction = bits >> 31, bits >> 23 & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:  # struct would quieten a signalling NaN
        return sign << 63 | 0x7FF << 52 | fraction << 29
    (value,) = struct.unpack("<f", bits.to_bytes(4, "little"))
    return int.from_bytes(struct.pack("<d", value), "little")


def narrow_float_bits(wide: int) -> int | None:
    """The inverse of ``widen_float_bits``; None if no float has the value."""
    if wide >> 52 & 0x7FF == 0x7FF:
        return None if wide & ((1 << 29) - 1) else wide >> 63 << 31 | 0xFF << 23 | wide >> 29 & 0x7FFFFF
    (value,) = struct.unpack("<d", wide.to_bytes(8, "little"))
    try:
        bits = int.from_bytes(struct.pack("<f", value), "little")
    except OverflowError:
        return None
    return bits if widen_float_bits(bits) == wide else None
