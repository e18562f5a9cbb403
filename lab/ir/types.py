"""Types of the IR, and how a data layout places them in memory. ``str`` of a type is its LLVM text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import IRError

__all__ = [
    "ArrayType",
    "DataLayout",
    "FloatType",
    "FunctionType",
    "IntType",
    "LabelType",
    "MetadataType",
    "PointerType",
    "StructType",
    "Type",
    "VectorType",
    "VoidType",
]

_FLOAT_BITS = {"half": 16, "bfloat": 16, "float": 32, "double": 64}


@dataclass(frozen=True, slots=True)
class VoidType:
    def __str__(self) -> str:
        return "void"


@dataclass(frozen=True, slots=True)
class LabelType:
    def __str__(self) -> str:
        return "label"


@dataclass(frozen=True, slots=True)
class MetadataType:
    def __str__(self) -> str:
        return "metadata"


@dataclass(frozen=True, slots=True)
class IntType:
    bits: int

    def __str__(self) -> str:
        return f"i{self.bits}"


@dataclass(frozen=True, slots=True)
class FloatType:
    """``kind`` is ``half``, ``bfloat``, ``float`` or ``double``."""

    kind: str

    @property
    def bits(self) -> int:
        return _FLOAT_BITS[self.kind]

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True, slots=True)
class PointerType:
    address_space: int = 0

    def __str__(self) -> str:
        return f"ptr addrspace({self.address_space})" if self.address_space else "ptr"


@dataclass(frozen=True, slots=True)
class VectorType:
    count: int
    element: Type

    def __str__(self) -> str:
        return f"<{self.count} x {self.element}>"


@dataclass(frozen=True, slots=True)
class ArrayType:
    count: int
    element: Type

    def __str__(self) -> str:
        return f"[{self.count} x {self.element}]"


@dataclass(frozen=True, slots=True)
class StructType:
    """A literal or a named struct. ``fields`` is None for an opaque one, which has no size."""

    fields: tuple[Type, ...] | None
    packed: bool = False
    name: str | None = None

    def __str__(self) -> str:
        return self.body if self.name is None else "%" + quoted(self.name)

    @property
    def body(self) -> str:
        """The struct spelt out, as the right side of its definition."""
        if self.fields is None:
            return "opaque"
        inner = "{ " + ", ".join(map(str, self.fields)) + " }" if self.fields else "{}"
        return f"<{inner}>" if self.packed else inner


@dataclass(frozen=True, slots=True)
class FunctionType:
    result: Type
    parameters: tuple[Type, ...]
    variadic: bool = False

    def __str__(self) -> str:
        parameters = [*map(str, self.parameters), *(["..."] if self.variadic else [])]
        return f"{self.result} ({', '.join(parameters)})"


Type = (
    VoidType
    | LabelType
    | MetadataType
    | IntType
    | FloatType
    | PointerType
    | VectorType
    | ArrayType
    | StructType
    | FunctionType
)


def quoted(name: str) -> str:
    """``name`` as it stands after ``%`` or ``@``: in quotes, with escapes, where LLVM needs them."""
    plain = name.isascii() and all(c.isalnum() or c in "-$._" for c in name)
    if name and plain and (name.isdigit() or not name[0].isdigit()):
        return name
    return f'"{escaped(name.encode("utf-8", "surrogateescape"))}"'


def escaped(data: bytes) -> str:
    """``data`` as it stands between quotes, in LLVM's escapes."""
    return "".join(_escape(byte) for byte in data)


def _escape(byte: int) -> str:
    if byte == ord("\\"):
        return "\\\\"
    return chr(byte) if 32 <= byte < 127 and byte != ord('"') else f"\\{byte:02X}"


@dataclass(frozen=True)
class DataLayout:
    """Sizes and alignments, in bytes, as the module's ``target datalayout`` gives them.

    An unsized type (void, label, metadata, function, opaque struct) raises IRError.
    """

    text: str
    pointers: dict[int, tuple[int, int]]  # address space -> size and alignment
    integers: dict[int, int]  # bits -> alignment
    floats: dict[int, int]
    vectors: dict[int, int]
    aggregate: int
    _offsets: dict[StructType, tuple[tuple[int, ...], int, int]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def parse(cls, text: str) -> DataLayout:
        """The layout that ``text`` describes, over LLVM's defaults. Only little endian is known."""
        pointers = {0: (8, 8)}
        integers = {1: 1, 8: 1, 16: 2, 32: 4, 64: 8}
        floats = {16: 2, 32: 4, 64: 8, 128: 16}
        vectors = {64: 8, 128: 16}
        aggregate = 1
        for part in text.split("-"):
            head, *rest = part.split(":")
            if head == "E":
                raise IRError("a big-endian data layout")
            elif head.startswith("p") and (head[1:].isdigit() or head == "p"):
                pointers[int(head[1:] or 0)] = (int(rest[0]) // 8, int(rest[1]) // 8)
            elif head.startswith("i") and head[1:].isdigit():
                integers[int(head[1:])] = int(rest[0]) // 8
            elif head.startswith("f") and head[1:].isdigit():
                floats[int(head[1:])] = int(rest[0]) // 8
            elif head.startswith("v") and head[1:].isdigit():
                vectors[int(head[1:])] = int(rest[0]) // 8
            elif head == "a" and rest:
                aggregate = max(1, int(rest[0]) // 8)
        return cls(text, pointers, integers, floats, vectors, aggregate)

    def bits(self, kind: Type) -> int:
        """Number of bits of a value of a sized type that holds no padding of its own."""
        match kind:
            case IntType() | FloatType():
                return kind.bits
            case PointerType():
                return 8 * self._pointer(kind)[0]
            case VectorType():
                return kind.count * self.bits(kind.element)
            case _:
                return 8 * self.size(kind)

    def store_size(self, kind: Type) -> int:
        """Bytes that a load or store of the type touches."""
        return (self.bits(kind) + 7) // 8

    def size(self, kind: Type) -> int:
        """Bytes from one array element of the type to the next."""
        match kind:
            case ArrayType():
                return kind.count * self.size(kind.element)
            case StructType():
                return self._place(kind)[1]
            case _ if _is_unsized(kind):
                raise IRError(f"the size of {kind}")
            case _:
                return _round_up(self.store_size(kind), self.align(kind))

    def align(self, kind: Type) -> int:
        """The type's ABI alignment."""
        match kind:
            case PointerType():
                return self._pointer(kind)[1]
            case IntType():
                wider = [bits for bits in self.integers if bits >= kind.bits]
                return self.integers[min(wider) if wider else max(self.integers)]
            case FloatType():
                return self.floats[kind.bits]
            case VectorType():
                given = self.vectors.get(self.bits(kind))
                return given or 1 << (max(1, self.store_size(kind)) - 1).bit_length()
            case ArrayType():
                return self.align(kind.element)
            case StructType():
                return self._place(kind)[2]
            case _:
                raise IRError(f"the alignment of {kind}")

    def offsets(self, struct: StructType) -> tuple[int, ...]:
        """Byte offset of each field."""
        return self._place(struct)[0]

    def element(self, kind: Type, index: int) -> tuple[int, Type]:
        """Byte offset and type of element ``index`` of an array, vector or struct."""
        match kind:
            case StructType(fields=tuple() as fields):
                return self.offsets(kind)[index], fields[index]
            case ArrayType() | VectorType():
                return index * self.size(kind.element), kind.element
            case _:
                raise IRError(f"an element of {kind}")

    def _pointer(self, kind: PointerType) -> tuple[int, int]:
        return self.pointers.get(kind.address_space, self.pointers[0])

    def _place(self, struct: StructType) -> tuple[tuple[int, ...], int, int]:
        known = self._offsets.get(struct)
        if known is None:
            if struct.fields is None:
                raise IRError(f"the size of the opaque type {struct}")
            known = self._offsets[struct] = self._place_fields(struct.fields, struct.packed)
        return known

    def _place_fields(self, fields: Sequence[Type], packed: bool) -> tuple[tuple[int, ...], int, int]:
        offsets, end, align = [], 0, 1 if packed else self.aggregate
        for kind in fields:
            step = 1 if packed else self.align(kind)
            end = _round_up(end, step)
            offsets.append(end)
            end += self.size(kind)
            align = max(align, step)
        return tuple(offsets), _round_up(end, align), align


def _is_unsized(kind: Type) -> bool:
    return isinstance(kind, VoidType | LabelType | MetadataType | FunctionType)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
