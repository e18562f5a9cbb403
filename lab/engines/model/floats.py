"""IEEE arithmetic in four formats, exactly rounded, on Python floats.

A value of any format is held as a Python float, which represents each exactly. An operation is done in
double and rounded once to the format. For ``half``, ``bfloat`` and ``float`` that gives what one rounding
gives: with p bits, double's 53 are at least 2p + 2, enough for add, subtract, multiply, divide and square
root. Sums that need more (``fma``) are first rounded to odd.

A NaN keeps its sign and payload while it is only moved (load, store, bitcast, select, negation). An
arithmetic result that is NaN is always the positive quiet NaN with no payload.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["BFLOAT", "DOUBLE", "FLOAT", "FORMATS", "HALF", "NAN", "Format"]

NAN = float("nan")
_INFINITY = math.inf
_DOUBLE = struct.Struct("<d")
_WORD = struct.Struct("<Q")


@dataclass(frozen=True)
class Format:
    """A binary floating-point format: bits in all, and in the fraction that is stored."""

    name: str
    bits: int
    fraction: int

    @property
    def exponent_mask(self) -> int:
        return (1 << (self.bits - 1 - self.fraction)) - 1

    @property
    def bias(self) -> int:
        return self.exponent_mask >> 1

    def decode(self, bits: int) -> float:
        """The value of a pattern."""
        if self.bits == 64:
            return float(_DOUBLE.unpack(_WORD.pack(bits))[0])
        sign = bits >> (self.bits - 1)
        exponent = bits >> self.fraction & self.exponent_mask
        fraction = bits & ((1 << self.fraction) - 1)
        if exponent == self.exponent_mask:
            wide = sign << 63 | 0x7FF << 52 | fraction << (52 - self.fraction)
            return float(_DOUBLE.unpack(_WORD.pack(wide))[0])
        if exponent:
            value = math.ldexp((1 << self.fraction) + fraction, exponent - self.bias - self.fraction)
        else:
            value = math.ldexp(fraction, 1 - self.bias - self.fraction)
        return -value if sign else value

    def encode(self, value: float) -> int:
        """The pattern of a value that the format holds exactly."""
        (wide,) = _WORD.unpack(_DOUBLE.pack(value))
        if self.bits == 64:
            return int(wide)
        sign = wide >> 63 << (self.bits - 1)
        top = self.exponent_mask << self.fraction
        if value != value:
            payload = (wide & ((1 << 52) - 1)) >> (52 - self.fraction)
            return int(sign | top | (payload or 1 << (self.fraction - 1)))
        if math.isinf(value):
            return int(sign | top)
        exponent = (wide >> 52 & 0x7FF) - 1023
        if wide << 1 & 0xFFFFFFFFFFFFFFFF == 0:
            return int(sign)
        if exponent < 1 - self.bias:  # subnormal here, normal as a double
            return int(sign | int(math.ldexp(abs(value), self.bias - 1 + self.fraction)))
        fraction = (wide & ((1 << 52) - 1)) >> (52 - self.fraction)
        return int(sign | (exponent + self.bias) << self.fraction | fraction)

    def round(self, value: float) -> float:
        """``value`` to the nearest of the format, ties to even; NaN to the one NaN."""
        if value != value:
            return NAN
        if value == 0.0 or math.isinf(value) or self.bits == 64:
            return value
        most = math.ldexp(1.0, self.bias + 1)
        if abs(value) >= most:
            return math.copysign(_INFINITY, value)
        exponent = max(math.frexp(value)[1] - 1, 1 - self.bias)
        unit = exponent - self.fraction  # the last place is 2 ** unit
        rounded = math.ldexp(round(math.ldexp(value, -unit)), unit)
        return math.copysign(_INFINITY if abs(rounded) >= most else rounded, value)

    def from_int(self, value: int) -> float:
        """An integer to the nearest of the format."""
        spare = value.bit_length() - 53
        if spare <= 0 or self.bits == 64:
            return self.round(float(value))
        size = abs(value)
        # Round to odd at 53 bits, so that the second rounding sees that there was more.
        odd = (size >> spare) | (size & ((1 << spare) - 1) != 0)
        return self.round(math.copysign(math.ldexp(odd, spare), value))

    def divide(self, x: float, y: float) -> float:
        if y == 0.0:
            if x == 0.0 or x != x:
                return NAN
            return math.copysign(_INFINITY, x) * math.copysign(1.0, y)
        return self.round(x / y)

    def remainder(self, x: float, y: float) -> float:
        """``frem``: the sign of ``x``, exact."""
        if x != x or y != y or math.isinf(x) or y == 0.0:
            return NAN
        return math.fmod(x, y)

    def sqrt(self, x: float) -> float:
        if x != x or x < 0.0:
            return NAN
        return self.round(math.sqrt(x))

    def fma(self, x: float, y: float, z: float) -> float:
        """``x * y + z`` with one rounding."""
        if not (math.isfinite(x) and math.isfinite(y)):
            return self.round(x * y + z)
        if not math.isfinite(z):
            return self.round(z)
        if self.bits == 64:
            return _fma_double(x, y, z)
        product = x * y  # exact: at most 48 bits
        total = product + z
        if product == 0.0 or total == 0.0:
            return self.round(total)
        high = total - product
        error = (product - (total - high)) + (z - high)
        if error != 0.0 and not _WORD.unpack(_DOUBLE.pack(total))[0] & 1:
            total = math.nextafter(total, math.copysign(_INFINITY, error))
        return self.round(total)

    def arithmetic(self, operation: str) -> Callable[[float, float], float]:
        """The function of ``fadd`` to ``frem``."""
        rounded = self.round
        match operation:
            case "fadd":
                return lambda x, y: rounded(x + y)
            case "fsub":
                return lambda x, y: rounded(x - y)
            case "fmul":
                return lambda x, y: rounded(x * y)
            case "fdiv":
                return self.divide
            case "frem":
                return self.remainder
        raise ValueError(operation)


class _Float(Format):
    """Single precision, by way of C's own conversion, which is much faster."""

    def round(self, value: float) -> float:
        if value != value:
            return NAN
        return _single(value).value


def _fma_double(x: float, y: float, z: float) -> float:
    if x == 0.0 or y == 0.0:
        return x * y + z
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    try:
        return float(exact)
    except OverflowError:
        return math.copysign(_INFINITY, exact)


_single = ctypes.c_float

HALF = Format("half", 16, 10)
BFLOAT = Format("bfloat", 16, 7)
FLOAT = _Float("float", 32, 23)
DOUBLE = Format("double", 64, 52)
FORMATS = {f.name: f for f in (HALF, BFLOAT, FLOAT, DOUBLE)}
