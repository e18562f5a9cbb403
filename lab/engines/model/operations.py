"""What each operation does to values.

Integers are Python ints without sign, floats Python floats. A function returns None where LLVM leaves the
result undefined (division by zero, a shift by the width or more, a float beyond the integer's range); who
calls it reports that and goes on with zero.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from ...ir import FloatType, IntType, PointerType, Type
from .errors import Unmodelled
from .floats import FORMATS, NAN, Format

__all__ = [
    "UNDEFINABLE",
    "atomic",
    "cast",
    "compare_floats",
    "compare_integers",
    "float_max",
    "float_min",
    "format_of",
    "integer",
    "saturated",
    "signed",
    "to_integer",
]

UNDEFINABLE = {
    "udiv": "division by zero",
    "urem": "division by zero",
    "sdiv": "division by zero or beyond the integer's range",
    "srem": "division by zero or beyond the integer's range",
    "shl": "a shift by the integer's width or more",
    "lshr": "a shift by the integer's width or more",
    "ashr": "a shift by the integer's width or more",
    "fptosi": "a float beyond the integer's range",
    "fptoui": "a float beyond the integer's range",
}
"""Operations whose result can be undefined, and why it then is."""


def signed(value: int, bits: int) -> int:
    """The value of a pattern in two's complement."""
    return value - (1 << bits) if value >> (bits - 1) else value


def saturated(value: int, bits: int, *, with_sign: bool) -> int:
    """The pattern nearest to ``value``."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if with_sign else (0, (1 << bits) - 1)
    return min(max(value, low), high) & ((1 << bits) - 1)


def format_of(kind: Type) -> Format:
    assert isinstance(kind, FloatType)
    return FORMATS[kind.kind]


def integer(operation: str, bits: int) -> Callable[[int, int], int | None]:
    """The function of ``add`` to ``xor``."""
    mask = (1 << bits) - 1
    match operation:
        case "add":
            return lambda x, y: (x + y) & mask
        case "sub":
            return lambda x, y: (x - y) & mask
        case "mul":
            return lambda x, y: (x * y) & mask
        case "and":
            return operator.and_
        case "or":
            return operator.or_
        case "xor":
            return operator.xor
        case "shl":
            return lambda x, y: (x << y) & mask if y < bits else None
        case "lshr":
            return lambda x, y: x >> y if y < bits else None
        case "ashr":
            return lambda x, y: (signed(x, bits) >> y) & mask if y < bits else None
        case "udiv":
            return lambda x, y: x // y if y else None
        case "urem":
            return lambda x, y: x % y if y else None
        case "sdiv":
            return lambda x, y: _divide(x, y, bits)
        case "srem":
            return lambda x, y: _remainder(x, y, bits)
    raise Unmodelled(f"the operation {operation}")


def _divide(x: int, y: int, bits: int) -> int | None:
    a, b = signed(x, bits), signed(y, bits)
    if b == 0 or (b == -1 and a == -(1 << (bits - 1))):
        return None
    quotient = abs(a) // abs(b)
    return (quotient if (a < 0) == (b < 0) else -quotient) & ((1 << bits) - 1)


def _remainder(x: int, y: int, bits: int) -> int | None:
    a, b = signed(x, bits), signed(y, bits)
    if b == 0 or (b == -1 and a == -(1 << (bits - 1))):
        return None
    rest = abs(a) % abs(b)
    return (rest if a >= 0 else -rest) & ((1 << bits) - 1)


_ORDER = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "lt": operator.lt,
    "le": operator.le,
}


def compare_integers(predicate: str, bits: int) -> Callable[[int, int], int]:
    """The function of ``icmp``."""
    test: Callable[[int, int], bool] = _ORDER[predicate[-2:]]
    if predicate[0] == "s":
        # Flipping the sign bit turns the signed order into the unsigned one.
        flip = 1 << (bits - 1)
        return lambda x, y: int(test(x ^ flip, y ^ flip))
    return lambda x, y: int(test(x, y))


def compare_floats(predicate: str) -> Callable[[float, float], int]:
    """The function of ``fcmp``."""
    match predicate:
        case "true":
            return lambda x, y: 1
        case "false":
            return lambda x, y: 0
        case "ord":
            return lambda x, y: int(x == x and y == y)
        case "uno":
            return lambda x, y: int(x != x or y != y)
    test: Callable[[float, float], bool] = _ORDER[predicate[1:]]
    if predicate[0] == "u":
        return lambda x, y: int(x != x or y != y or test(x, y))
    return lambda x, y: int(x == x and y == y and test(x, y))


def to_integer(value: float, bits: int, *, with_sign: bool) -> int | None:
    """A float to an integer, toward zero; None where that is out of range or a NaN."""
    if not math.isfinite(value):
        return None
    whole = math.trunc(value)
    result = saturated(whole, bits, with_sign=with_sign)
    return result if (signed(result, bits) if with_sign else result) == whole else None


def cast(operation: str, source: Type, target: Type, address_bits: int) -> Callable[[Any], Any]:
    """The function of a cast between scalar types; ``bitcast`` only between types of one size."""
    from_bits = source.bits if isinstance(source, IntType | FloatType) else address_bits
    to_bits = target.bits if isinstance(target, IntType | FloatType) else address_bits
    mask = (1 << to_bits) - 1
    match operation:
        case "trunc" | "ptrtoint" | "ptrtoaddr" | "inttoptr":
            return lambda x: x & mask
        case "zext" | "addrspacecast":
            return lambda x: x
        case "sext":
            return lambda x: signed(x, from_bits) & mask
        case "fptrunc" | "fpext":
            return format_of(target).round
        case "sitofp":
            convert = format_of(target).from_int
            return lambda x: convert(signed(x, from_bits))
        case "uitofp":
            return format_of(target).from_int
        case "fptosi":
            return lambda x: to_integer(x, to_bits, with_sign=True)
        case "fptoui":
            return lambda x: to_integer(x, to_bits, with_sign=False)
        case "bitcast":
            return bits_to_value(target, bits_of(source))
    raise Unmodelled(f"the cast {operation}")


def bits_of(kind: Type) -> Callable[[Any], int]:
    """From a value of a scalar type to its pattern."""
    if isinstance(kind, FloatType):
        return format_of(kind).encode
    return lambda value: int(value)


def bits_to_value(kind: Type, pattern: Callable[[Any], int]) -> Callable[[Any], Any]:
    """``pattern``, then from there to a value of a scalar type."""
    if isinstance(kind, FloatType):
        decode = format_of(kind).decode
        return lambda value: decode(pattern(value))
    if isinstance(kind, IntType | PointerType):
        return pattern
    raise Unmodelled(f"a bitcast to {kind}")


def float_min(x: float, y: float) -> float:
    """The smaller; a NaN only if both are. Of zeros the negative one."""
    return -float_max(-x, -y)


def float_max(x: float, y: float) -> float:
    """The larger; a NaN only if both are. Of zeros the positive one."""
    if x != x:
        return y if y == y else NAN
    if y != y or x > y:
        return x
    if x == y == 0.0:
        return x if math.copysign(1.0, x) > 0 else y
    return y


def atomic(operation: str, kind: Type, address_bits: int) -> Callable[[Any, Any], Any]:
    """From old value and operand to the new value, for ``atomicrmw``."""
    if operation == "xchg":
        return lambda old, new: new
    if isinstance(kind, FloatType):
        return _atomic_float(operation, format_of(kind))
    bits = kind.bits if isinstance(kind, IntType) else address_bits
    mask, flip = (1 << bits) - 1, 1 << (bits - 1)
    match operation:
        case "add" | "sub" | "and" | "or" | "xor":
            return integer(operation, bits)
        case "nand":
            return lambda old, x: ~(old & x) & mask
        case "umax":
            return max
        case "umin":
            return min
        case "max":
            return lambda old, x: max(old ^ flip, x ^ flip) ^ flip
        case "min":
            return lambda old, x: min(old ^ flip, x ^ flip) ^ flip
        case "uinc_wrap":
            return lambda old, x: 0 if old >= x else old + 1
        case "udec_wrap":
            return lambda old, x: x if old == 0 or old > x else old - 1
        case "usub_cond":
            return lambda old, x: old - x if old >= x else old
        case "usub_sat":
            return lambda old, x: max(old - x, 0)
    raise Unmodelled(f"the atomic operation {operation}")


def _atomic_float(operation: str, form: Format) -> Callable[[float, float], float]:
    match operation:
        case "fadd" | "fsub":
            return form.arithmetic(operation)
        case "fmax":
            return float_max
        case "fmin":
            return float_min
        case "fmaximum":
            return lambda x, y: NAN if x != x or y != y else float_max(x, y)
        case "fminimum":
            return lambda x, y: NAN if x != x or y != y else float_min(x, y)
    raise Unmodelled(f"the atomic operation {operation}")
