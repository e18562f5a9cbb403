"""LLVM intrinsics that only compute: from argument values to a result, lane by lane over vectors.

Those that touch memory or end a thread are in ``program``. A result of None is undefined, as in
``operations``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ...ir import FloatType, IntType, Type, VectorType
from . import operations as op
from .floats import NAN, Format

__all__ = ["NOTHING", "compute"]

Function = Callable[..., Any]

NOTHING = frozenset(
    (
        "lifetime.start",
        "lifetime.end",
        "invariant.end",
        "dbg.declare",
        "dbg.value",
        "dbg.assign",
        "dbg.label",
        "experimental.noalias.scope.decl",
        "prefetch",
        "donothing",
        "sideeffect",
        "stackrestore",
        "var.annotation",
    )
)
"""Intrinsics without effect on a run."""

_UNDEFINED_ZERO = "the bits of zero counted where that is undefined"


def compute(name: str, arguments: Sequence[Type], result: Type) -> tuple[Function, str | None] | None:
    """The function of intrinsic ``name`` (without ``llvm.``), and why its result may be undefined.

    None if the name is not known here.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        base = ".".join(parts[:length])
        function = _whole(base, arguments, result)
        if function is not None:
            return function, None
        function = _scalar(base, [_element(kind) for kind in arguments], _element(result))
        if function is not None:
            if isinstance(result, VectorType) or any(isinstance(a, VectorType) for a in arguments):
                function = _over_lanes(function, [isinstance(a, VectorType) for a in arguments])
            return function, _UNDEFINED_ZERO if base in ("ctlz", "cttz") else None
    return None


def _element(kind: Type) -> Type:
    return kind.element if isinstance(kind, VectorType) else kind


def _over_lanes(function: Function, vectors: Sequence[bool]) -> Function:
    """``function`` for each lane; arguments that are no vectors are the same for all."""

    def lanes(*arguments: Any) -> tuple[Any, ...]:
        count = next(len(a) for a, vector in zip(arguments, vectors, strict=True) if vector)
        columns = [a if vector else (a,) * count for a, vector in zip(arguments, vectors, strict=True)]
        return tuple(function(*lane) for lane in zip(*columns, strict=True))

    return lanes


def _whole(base: str, arguments: Sequence[Type], result: Type) -> Function | None:
    """Intrinsics over whole values: reductions, results that are structs, hints."""
    match base:
        case "expect" | "expect.with.probability" | "launder.invariant.group" | "strip.invariant.group":
            return lambda value, *_: value
        case "ssa.copy" | "threadlocal.address" | "annotation" | "ptr.annotation":
            return lambda value, *_: value
        case "is.constant":
            return lambda *_: 0
        case "objectsize":
            return lambda _pointer, minimum, *_: 0 if minimum else (1 << 64) - 1
        case "invariant.start" | "stacksave":
            return lambda *_: 0
        case "ptrmask":
            return lambda pointer, mask: pointer & mask
        case "vector.reverse":
            return lambda vector: vector[::-1]
        case "vector.extract":
            assert isinstance(result, VectorType)
            count = result.count
            return lambda vector, at: vector[at : at + count]
        case "vector.insert":
            return lambda vector, part, at: (*vector[:at], *part, *vector[at + len(part) :])
    if base.startswith("vector.reduce."):
        return _reduction(base.removeprefix("vector.reduce."), arguments)
    if base.endswith(".with.overflow"):
        return _overflowing(base.removesuffix(".with.overflow"), arguments[0])
    if base == "frexp" and isinstance(_element(arguments[0]), FloatType):
        pairs = _over_lanes(_frexp, [True])
        if isinstance(arguments[0], VectorType):
            return lambda x: tuple(zip(*pairs(x), strict=True))
        return _frexp
    return None


def _frexp(x: float) -> tuple[float, int]:
    if not math.isfinite(x):
        return (x if x == x else NAN), 0
    fraction, exponent = math.frexp(x)
    return fraction, exponent & 0xFFFFFFFF


def _reduction(name: str, arguments: Sequence[Type]) -> Function | None:
    element = _element(arguments[-1])
    if name in ("fadd", "fmul"):
        combine = op.format_of(element).arithmetic(name)
        return lambda start, vector: functools.reduce(combine, vector, start)
    step: Function | None = None
    if isinstance(element, FloatType):
        names = {"fmax": "maxnum", "fmin": "minnum", "fmaximum": "maximum", "fminimum": "minimum"}
        step = _float(names.get(name, ""), op.format_of(element))
    elif isinstance(element, IntType) and name in ("add", "mul", "and", "or", "xor"):
        step = op.integer(name, element.bits)
    elif isinstance(element, IntType):
        step = _integer(name, element.bits)
    return None if step is None else functools.partial(functools.reduce, step)


def _overflowing(name: str, kind: Type) -> Function | None:
    element = _element(kind)
    if not isinstance(element, IntType) or name[1:] not in ("add", "sub", "mul") or name[0] not in "su":
        return None
    bits, with_sign = element.bits, name[0] == "s"

    def one(x: int, y: int) -> tuple[int, int]:
        exact = _exact(name[1:], x, y, bits, with_sign=with_sign)
        wrapped = exact & ((1 << bits) - 1)
        return wrapped, int((op.signed(wrapped, bits) if with_sign else wrapped) != exact)

    if isinstance(kind, VectorType):
        lanes = _over_lanes(one, [True, True])
        return lambda x, y: tuple(zip(*lanes(x, y), strict=True))
    return one


def _exact(name: str, x: int, y: int, bits: int, *, with_sign: bool) -> int:
    """``add``, ``sub``, ``mul`` or ``shl`` of two patterns, as an integer without bounds."""
    a = op.signed(x, bits) if with_sign else x
    b = op.signed(y, bits) if with_sign and name != "shl" else y
    match name:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case _:
            return a << b


def _scalar(base: str, arguments: Sequence[Type], result: Type) -> Function | None:
    """Intrinsics lane by lane."""
    first = arguments[0] if arguments else None
    if base in ("fptosi.sat", "fptoui.sat"):
        assert isinstance(result, IntType)
        return _saturating_cast(result.bits, with_sign=base == "fptosi.sat")
    if base in ("lrint", "llrint", "lround", "llround") and isinstance(result, IntType):
        rounding = _whole_number(base.lstrip("l") if base[-3:] == "int" else "round")
        bits = result.bits
        return lambda x: op.to_integer(rounding(x), bits, with_sign=True)
    if base == "ldexp" and isinstance(first, FloatType) and isinstance(arguments[1], IntType):
        return _ldexp(op.format_of(first), arguments[1].bits)
    if base == "is.fpclass" and isinstance(first, FloatType):
        return _is_class(op.format_of(first))
    if isinstance(first, FloatType):
        return _float(base, op.format_of(first))
    if isinstance(first, IntType):
        if base in ("scmp", "ucmp") and isinstance(result, IntType):
            return _three_way(first.bits, result.bits, with_sign=base == "scmp")
        return _integer(base, first.bits)
    return None


def _integer(base: str, bits: int) -> Function | None:
    mask, flip = (1 << bits) - 1, 1 << (bits - 1)
    match base:
        case "smax":
            return lambda x, y: max(x ^ flip, y ^ flip) ^ flip
        case "smin":
            return lambda x, y: min(x ^ flip, y ^ flip) ^ flip
        case "umax":
            return max
        case "umin":
            return min
        case "abs":
            return lambda x, _: abs(op.signed(x, bits)) & mask
        case "ctpop":
            return int.bit_count
        case "ctlz":
            return lambda x, undefined: None if undefined and not x else bits - x.bit_length()
        case "cttz":
            return lambda x, undefined: (
                (x & -x).bit_length() - 1 if x else None if undefined else bits
            )  # the lowest set bit
        case "bswap":
            return lambda x: int.from_bytes(x.to_bytes(bits // 8, "little"), "big")
        case "bitreverse":
            return lambda x: int(f"{x:0{bits}b}"[::-1], 2)
        case "fshl":
            return lambda x, y, n: ((x << bits | y) << (n % bits)) >> bits & mask
        case "fshr":
            return lambda x, y, n: (x << bits | y) >> (n % bits) & mask
    operation, _, kind = base.partition(".")
    if kind == "sat" and operation[0] in "su" and operation[1:] in ("add", "sub", "shl"):
        with_sign, name = operation[0] == "s", operation[1:]
        return lambda x, y: op.saturated(
            _exact(name, x, y, bits, with_sign=with_sign), bits, with_sign=with_sign
        )
    return None


def _three_way(bits: int, result_bits: int, *, with_sign: bool) -> Function:
    flip = 1 << (bits - 1) if with_sign else 0
    mask = (1 << result_bits) - 1
    return lambda x, y: ((x ^ flip > y ^ flip) - (x ^ flip < y ^ flip)) & mask


def _float(base: str, form: Format) -> Function | None:
    match base:
        case "fabs":
            return math.fabs
        case "copysign":
            return math.copysign
        case "sqrt":
            return form.sqrt
        case "fma" | "fmuladd":
            return form.fma
        case "canonicalize":
            return form.round
        case "minnum" | "minimumnum":
            return op.float_min
        case "maxnum" | "maximumnum":
            return op.float_max
        case "minimum":
            return lambda x, y: NAN if x != x or y != y else op.float_min(x, y)
        case "maximum":
            return lambda x, y: NAN if x != x or y != y else op.float_max(x, y)
        case "floor" | "ceil" | "trunc" | "rint" | "nearbyint" | "roundeven" | "round":
            return _whole_number(base)
    return None


def _whole_number(base: str) -> Callable[[float], float]:
    """Rounding to a whole number, which every format that holds the operand holds too."""

    rounding: dict[str, Callable[[float], int]] = {
        "floor": math.floor,
        "ceil": math.ceil,
        "trunc": math.trunc,
        "round": _half_away,
    }
    to_whole = rounding.get(base, round)  # Python's own rounds ties to even

    def apply(x: float) -> float:
        if x != x:
            return NAN
        return x if math.isinf(x) else math.copysign(to_whole(x), x)

    return apply


def _half_away(x: float) -> int:
    whole = math.trunc(x)
    return whole if abs(x - whole) < 0.5 else whole + (1 if x > 0 else -1)


def _saturating_cast(bits: int, *, with_sign: bool) -> Function:
    def convert(x: float) -> int:
        if x != x:
            return 0
        whole = int(math.copysign(1 << 4 * bits, x)) if math.isinf(x) else math.trunc(x)
        return op.saturated(whole, bits, with_sign=with_sign)

    return convert


def _ldexp(form: Format, bits: int) -> Function:
    def scale(x: float, exponent: int) -> float:
        if x == 0.0 or not math.isfinite(x):
            return form.round(x)
        # Beyond this every result is a zero or an infinity, and short of it none is one early.
        power = min(max(op.signed(exponent, bits), -4000), 4000)
        if form.bits == 64:
            try:
                return math.ldexp(x, power)
            except OverflowError:
                return math.copysign(math.inf, x)
        return form.round(math.ldexp(x, min(max(power, -600), 600)))

    return scale


def _is_class(form: Format) -> Function:
    """``is.fpclass``: bits 0 to 9 are signalling and quiet NaN, then -inf up to +inf by class."""
    quiet = 1 << (form.fraction - 1)
    smallest = math.ldexp(1.0, 1 - form.bias)

    def test(x: float, classes: int) -> int:
        if x != x:
            return classes >> bool(form.encode(x) & quiet) & 1
        size = abs(x)
        rank = 3 if math.isinf(x) else 2 if size >= smallest else 1 if size else 0
        return classes >> (5 - rank if math.copysign(1.0, x) < 0 else 6 + rank) & 1

    return test
