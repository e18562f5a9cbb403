"""Memory of a dispatch: separate objects far from each other, and values as bytes in them.

An address is a number. Each object lies in the middle of a slot of 256 GiB of its own, so that an index
wrong by up to 32 bits stays in the slot, and the fault can say what object was missed, and by how much.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...ir import (
    ArrayType,
    DataLayout,
    FloatType,
    IntType,
    PointerType,
    StructType,
    Type,
    VectorType,
)
from .errors import Access, AccessError, Unmodelled
from .floats import FORMATS

__all__ = ["Codec", "Memory", "Object", "codec"]

_SLOT_BITS = 38
_SLOTS = 1 << (63 - _SLOT_BITS)


@dataclass(slots=True)
class Object:
    """A piece of memory: ``data`` from ``address`` on. ``name`` is for messages."""

    name: str
    address: int
    data: bytearray
    read_only: bool = False
    buffer: int | None = None

    @property
    def slot(self) -> int:
        return self.address >> _SLOT_BITS


class Memory:
    """All objects of a dispatch."""

    def __init__(self) -> None:
        self._objects: dict[int, Object] = {}
        self._next = 1  # slot 0 holds the null pointer

    def add(
        self, name: str, data: bytearray, *, skew: int = 0, read_only: bool = False, buffer: int | None = None
    ) -> Object:
        """Place ``data`` (kept, not copied) ``skew`` bytes past a multiple of 4096."""
        while self._next in self._objects:
            self._next = self._next % (_SLOTS - 1) + 1
        address = (self._next << _SLOT_BITS) + (1 << (_SLOT_BITS - 1)) + skew
        placed = Object(name, address, data, read_only, buffer)
        self._objects[self._next] = placed
        self._next = self._next % (_SLOTS - 1) + 1
        return placed

    def remove(self, placed: Object) -> None:
        """Take an object away; its addresses are not used again for a long time."""
        del self._objects[placed.slot]

    def locate(self, address: int, size: int, write: bool) -> tuple[bytearray, int]:
        """The bytes that hold an access and its offset in them. Raises AccessError."""
        found = self._objects.get(address >> _SLOT_BITS)
        if found is None:
            raise AccessError(Access(address, size, write))
        offset = address - found.address
        if offset < 0 or offset + size > len(found.data) or (write and found.read_only):
            raise AccessError(
                Access(
                    address, size, write, found.name, len(found.data), offset, found.buffer, found.read_only
                )
            )
        return found.data, offset

    def read(self, address: int, size: int) -> bytes:
        data, offset = self.locate(address, size, False)
        return bytes(data[offset : offset + size])

    def write(self, address: int, content: bytes) -> None:
        data, offset = self.locate(address, len(content), True)
        data[offset : offset + len(content)] = content


@dataclass(frozen=True, slots=True)
class Codec:
    """How values of a type lie in memory.

    An integer is a Python int without sign, a pointer its address, a float a Python float, a vector, array or
    struct a tuple. ``size`` is the number of bytes a load or store touches; ``zero`` the value of zero bytes.
    """

    size: int
    zero: Any
    decode: Callable[[bytes | bytearray, int], Any]
    """From bytes and an offset."""
    encode: Callable[[Any], bytes]


def codec(layout: DataLayout, kind: Type) -> Codec:
    """The codec of a type. Raises Unmodelled for one that has no values in memory."""
    match kind:
        case IntType(bits):
            return _integer(bits)
        case PointerType():
            return _integer(layout.bits(kind))
        case FloatType(name):
            return _float(name)
        case VectorType(count, IntType(bits)) if bits % 8:
            return _packed(count, bits)
        case VectorType(count, element):
            inner = codec(layout, element)
            return _sequence([inner] * count, [inner.size * i for i in range(count)], inner.size * count)
        case ArrayType(count, element):
            step = layout.size(element)
            return _sequence([codec(layout, element)] * count, [step * i for i in range(count)], step * count)
        case StructType(fields=tuple() as fields):
            return _sequence([codec(layout, f) for f in fields], layout.offsets(kind), layout.size(kind))
    raise Unmodelled(f"values of type {kind} in memory")


_INTEGERS = {
    8: struct.Struct("<B"),
    16: struct.Struct("<H"),
    32: struct.Struct("<I"),
    64: struct.Struct("<Q"),
}


def _integer(bits: int) -> Codec:
    size = (bits + 7) // 8
    packer = _INTEGERS.get(bits)
    if packer is not None:
        unpack = packer.unpack_from
        return Codec(size, 0, lambda data, at: unpack(data, at)[0], packer.pack)
    mask = (1 << bits) - 1
    return Codec(
        size,
        0,
        lambda data, at: int.from_bytes(data[at : at + size], "little") & mask,
        lambda value: int(value).to_bytes(size, "little"),
    )


def _float(name: str) -> Codec:
    kind = FORMATS[name]
    size = kind.bits // 8
    if name == "double":
        double = struct.Struct("<d")
        return Codec(size, 0.0, lambda data, at: double.unpack_from(data, at)[0], double.pack)

    def decode(data: bytes | bytearray, at: int) -> float:
        return kind.decode(int.from_bytes(data[at : at + size], "little"))

    def encode(value: float) -> bytes:
        return kind.encode(value).to_bytes(size, "little")

    if name != "float":
        return Codec(size, 0.0, decode, encode)
    single = struct.Struct("<f")

    def decode_single(data: bytes | bytearray, at: int) -> float:
        value: float = single.unpack_from(data, at)[0]
        return value if value == value else decode(data, at)  # C's conversion would quieten a NaN

    def encode_single(value: float) -> bytes:
        return single.pack(value) if value == value else encode(value)

    return Codec(size, 0.0, decode_single, encode_single)


def _packed(count: int, bits: int) -> Codec:
    """A vector of integers that fill no bytes: element 0 in the lowest bits."""
    size, mask = (count * bits + 7) // 8, (1 << bits) - 1

    def decode(data: bytes | bytearray, at: int) -> tuple[int, ...]:
        word = int.from_bytes(data[at : at + size], "little")
        return tuple(word >> (i * bits) & mask for i in range(count))

    def encode(value: tuple[int, ...]) -> bytes:
        return sum(v << (i * bits) for i, v in enumerate(value)).to_bytes(size, "little")

    return Codec(size, (0,) * count, decode, encode)


def _sequence(parts: list[Codec], offsets: list[int] | tuple[int, ...], size: int) -> Codec:
    places = list(zip(parts, offsets, strict=True))

    def decode(data: bytes | bytearray, at: int) -> tuple[Any, ...]:
        return tuple([part.decode(data, at + offset) for part, offset in places])

    def encode(value: tuple[Any, ...]) -> bytes:
        content = bytearray(size)
        for (part, offset), element in zip(places, value, strict=True):
            content[offset : offset + part.size] = part.encode(element)
        return bytes(content)

    return Codec(size, tuple(part.zero for part in parts), decode, encode)
