"""The ``__msl_`` primitives at which lanes meet: who can meet in one, and what it computes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .floats import FLOAT
from .operations import float_max, float_min, integer

__all__ = ["LANE", "QUAD", "SIMDGROUP", "STORAGE", "THREADGROUP", "Primitive", "primitive"]

LANE = "__msl_lane"
"""The lane's index in its simdgroup: a primitive that is no meeting."""

STORAGE = "msl_threadgroup_block"
"""The address of a variable in threadgroup memory, from its id and size: no meeting either."""

THREADGROUP = "threadgroup"
SIMDGROUP = "simdgroup"
QUAD = "quadgroup"

Arguments = Mapping[int, tuple[Any, ...]]
Results = Mapping[int, Any]


@dataclass(frozen=True)
class Primitive:
    """``scope`` says among whom it is. ``evaluate`` goes from the arguments of the lanes that take part, by
    index in the scope and in increasing order, to their results; None stands for what nobody gave."""

    name: str
    scope: str
    evaluate: Callable[[Arguments], Results]

    @property
    def is_barrier(self) -> bool:
        return self.name.endswith("_barrier")


_NAME = re.compile(r"__msl_(simd|quad)_(.+)")


@functools.cache
def primitive(name: str) -> Primitive | None:
    """The primitive of that name, None if there is none."""
    if name == "__msl_threadgroup_barrier":
        return Primitive(name, THREADGROUP, _nothing)
    if name == "__msl_simdgroup_barrier":
        return Primitive(name, SIMDGROUP, _nothing)
    match = _NAME.fullmatch(name)
    evaluate = None if match is None else _evaluation(match[2])
    if match is None or evaluate is None:
        return None
    return Primitive(name, SIMDGROUP if match[1] == "simd" else QUAD, evaluate)


def _evaluation(name: str) -> Callable[[Arguments], Results] | None:
    match name:
        case "shuffle":
            return _shuffle
        case "broadcast_first":
            return _broadcast_first
        case "ballot":
            return _ballot
    words = name.split("_")
    operation = None if len(words) < 2 else _operation(words[-2], words[-1])
    if operation is None:
        return None
    combine, identity = operation
    match words[:-2]:
        case []:
            return lambda arguments: _reduce(arguments, combine)
        case ["prefix", "inclusive"]:
            return lambda arguments: _scan(arguments, combine, None)
        case ["prefix", "exclusive"] if identity is not None:
            return lambda arguments: _scan(arguments, combine, identity)
    return None


def _operation(name: str, kind: str) -> tuple[Callable[[Any, Any], Any], Any] | None:
    """A binary operation and its identity; the latter only where a prefix operation needs it."""
    if kind == "f32":
        return {
            "sum": (FLOAT.arithmetic("fadd"), 0.0),
            "product": (FLOAT.arithmetic("fmul"), 1.0),
            "min": (float_min, None),
            "max": (float_max, None),
        }.get(name)
    if kind not in ("i32", "u32", "i64", "u64"):
        return None
    bits = int(kind[1:])
    flip = 1 << (bits - 1) if kind[0] == "i" else 0
    return {
        "sum": (integer("add", bits), 0),
        "product": (integer("mul", bits), 1),
        "min": (lambda x, y: min(x ^ flip, y ^ flip) ^ flip, None),
        "max": (lambda x, y: max(x ^ flip, y ^ flip) ^ flip, None),
        "and": (integer("and", bits), None),
        "or": (integer("or", bits), None),
        "xor": (integer("xor", bits), None),
    }.get(name)


def _nothing(arguments: Arguments) -> Results:
    return dict.fromkeys(arguments)


def _reduce(arguments: Arguments, combine: Callable[[Any, Any], Any]) -> Results:
    """In the order of the lanes."""
    return dict.fromkeys(arguments, functools.reduce(combine, [value for (value,) in arguments.values()]))


def _scan(arguments: Arguments, combine: Callable[[Any, Any], Any], identity: Any) -> Results:
    """Inclusive; exclusive if there is an ``identity`` to begin with."""
    results, total, started = {}, identity, identity is not None
    for lane, (value,) in arguments.items():
        if identity is not None:
            results[lane] = total
        total = combine(total, value) if started else value
        started = True
        if identity is None:
            results[lane] = total
    return results


def _shuffle(arguments: Arguments) -> Results:
    given = {lane: bits for lane, (bits, _) in arguments.items()}
    return {lane: given.get(source) for lane, (_, source) in arguments.items()}


def _broadcast_first(arguments: Arguments) -> Results:
    return dict.fromkeys(arguments, next(iter(arguments.values()))[0])


def _ballot(arguments: Arguments) -> Results:
    return dict.fromkeys(arguments, sum(1 << lane for lane, (predicate,) in arguments.items() if predicate))
