"""Types and struct layouts as the compiler sees them, read from the numbers a unit describes itself with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

# In the order of msl_scalar in include/msl_unit.h: name of the scalar in MSL, and in NumPy and MLX.
SCALARS: tuple[tuple[str, str], ...] = (
    ("void", "uint8"),
    ("bool", "bool"),
    ("char", "int8"),
    ("uchar", "uint8"),
    ("short", "int16"),
    ("ushort", "uint16"),
    ("int", "int32"),
    ("uint", "uint32"),
    ("long", "int64"),
    ("ulong", "uint64"),
    ("half", "float16"),
    ("bfloat", "bfloat16"),
    ("float", "float32"),
    ("double", "float64"),
    ("?", "uint8"),
)
STRUCT = 100  # scalar codes from here on name a struct of the source
_SPACES = ("", "device", "constant", "threadgroup")
_INDIRECTION = ("", "*", "&")


@dataclass(frozen=True)
class Element:
    """What a pointer points to: a scalar, vector, matrix or struct.

    ``scalar`` is MSL's name (``struct`` for structs, whose name is ``struct``); ``dtype`` the NumPy and
    MLX name; ``components`` and ``columns`` count vector components and matrix columns; ``size`` is the
    size of one element in bytes, padding included; ``count`` the length where it is a fixed array.
    What has no layout that we know, such as an instance of a template, has the scalar ``?`` and is spelled
    as the source does, in ``struct``'s place.
    """

    scalar: str
    dtype: str
    components: int = 1
    columns: int = 1
    size: int = 0
    count: int = 1
    struct: str = ""

    @property
    def lanes(self) -> int:
        """Scalars that one element takes in an array, padding included (4 for a float3)."""
        scalar = scalar_size(self.dtype)
        return max(1, self.size // scalar) if scalar else 1

    def __str__(self) -> str:
        if self.struct:
            return self.struct
        if self.columns > 1:
            return f"{self.scalar}{self.columns}x{self.components}"
        if self.components > 1:
            packed = "packed_" if self.components == 3 and self.lanes == 3 else ""
            return f"{packed}{self.scalar}{self.components}"
        return self.scalar


@dataclass(frozen=True)
class ParameterType:
    """Type of a kernel parameter: address space, const, pointer (``*``) or reference (``&``), element."""

    space: str
    const: bool
    indirection: str
    element: Element

    def __str__(self) -> str:
        const = "const " if self.const and self.space != "constant" else ""
        space = f"{self.space} " if self.space else ""
        if self.element.count > 1:
            return f"{space}{const}{self.element} ({self.indirection})[{self.element.count}]"
        return f"{space}{const}{self.element}{self.indirection}"


@dataclass(frozen=True)
class Field:
    """One data member of a struct: name, element, byte offset; ``element.count`` is its array length."""

    name: str
    element: Element
    offset: int


@dataclass(frozen=True)
class StructLayout:
    """Size in bytes and members of a struct, as the compiler lays it out."""

    name: str
    size: int
    fields: tuple[Field, ...]


def scalar_size(dtype: str) -> int:
    """Bytes of one scalar of a NumPy or MLX dtype name."""
    if dtype == "bool":
        return 1
    digits = re.search(r"\d+$", dtype)
    return int(digits.group()) // 8 if digits else 1


_NUMBERS = re.compile(
    r"^@(msl_(?:kernel|struct|index|present|known|number)_\d+)"
    r" = .*?constant \[(\d+) x i32\] (.*?)(?:, align \d+)?$",
    re.M,
)


def numbers(ir: str) -> dict[str, list[int]]:
    """The constants ``msl_kernel_N``, ``msl_struct_N`` and the like of a unit's LLVM IR."""
    found = {}
    for name, count, value in _NUMBERS.findall(ir):
        if value.startswith("zeroinitializer"):
            found[name] = [0] * int(count)
        else:
            found[name] = [int(x) & 0xFFFFFFFF for x in re.findall(r"i32 (-?\d+)", value)]
    return found


def parameter_type(record: list[int], structs: Mapping[int, str], spelled: str = "?") -> ParameterType:
    """One parameter from its eight numbers (``MSL_DESCRIBE``).

    ``structs`` names structs by their id; ``spelled`` is how messages call an element of unknown layout.
    """
    indirection, space, const, *element = record
    found = _element(element, structs, spelled)
    return ParameterType(_SPACES[space], bool(const), _INDIRECTION[indirection], found)


def struct_layout(
    name: str, fields: tuple[str, ...], record: list[int], structs: Mapping[int, str]
) -> StructLayout:
    """A struct from its numbers: its size, then for each field the offset and five of its element."""
    read = []
    for i, field_name in enumerate(fields):
        offset, *element = record[1 + 6 * i : 7 + 6 * i]
        read.append(Field(field_name, _element(element, structs), offset))
    return StructLayout(name, record[0], tuple(read))


def _element(record: list[int], structs: Mapping[int, str], spelled: str = "?") -> Element:
    code, components, columns, size, count = record
    if code >= STRUCT:
        return Element("struct", "uint8", 1, 1, size, count, structs.get(code - STRUCT, "struct"))
    scalar, dtype = SCALARS[code]
    if scalar == "?":
        return Element(scalar, dtype, 1, 1, size, count, spelled)
    return Element(scalar, dtype, components, columns, size, count)
