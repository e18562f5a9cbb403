"""Function constants: values given when a source is compiled, as text for the compiler."""

from __future__ import annotations

import ast
import math
import numbers
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import ArgumentError
from .declarations import SCALAR_TYPES, Declarations, Edit, FunctionConstant

INDICES = 65536  # function constants that Metal can tell apart

_RANGES = {
    "char": (-128, 127), "int8_t": (-128, 127), "uchar": (0, 255), "uint8_t": (0, 255),
    "short": (-(1 << 15), (1 << 15) - 1), "int16_t": (-(1 << 15), (1 << 15) - 1),
    "ushort": (0, (1 << 16) - 1), "uint16_t": (0, (1 << 16) - 1),
    "int": (-(1 << 31), (1 << 31) - 1), "int32_t": (-(1 << 31), (1 << 31) - 1),
    "uint": (0, (1 << 32) - 1), "uint32_t": (0, (1 << 32) - 1),
    "long": (-(1 << 63), (1 << 63) - 1), "int64_t": (-(1 << 63), (1 << 63) - 1),
    "ulong": (0, (1 << 64) - 1), "uint64_t": (0, (1 << 64) - 1), "size_t": (0, (1 << 64) - 1),
}  # fmt: skip
_FLOATS = frozenset({"float", "half", "bfloat"})
_VECTOR = re.compile(r"(?:metal::)?(?:vec<(\w+), ?([234])>|([a-z]+)([234]))")
_SPELLINGS = {
    "unsigned": "uint", "unsigned int": "uint", "unsigned char": "uchar", "unsigned short": "ushort",
    "unsigned long": "ulong", "signed char": "char", "bfloat16_t": "bfloat", "float16_t": "half",
}  # fmt: skip


def integer(text: str) -> int | None:
    """The value of an integer expression of plain numbers, as macros leave it; None for any other."""
    plain = re.sub(r"(?<=[0-9a-fA-F])[uUlL]+\b", "", text.strip())
    try:
        return _integer(ast.parse(plain, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, TypeError, MemoryError, RecursionError):
        return None


_OPERATIONS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv, ast.Mod: operator.mod, ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
    ast.BitXor: operator.xor, ast.LShift: lambda a, b: a << min(b, 64), ast.RShift: operator.rshift,
}  # fmt: skip


def _integer(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_integer(node.left), _integer(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return -_integer(node.operand) if isinstance(node.op, ast.USub) else _integer(node.operand)
    raise ValueError("no integer expression of plain numbers")


def given(
    found: Declarations, indices: Mapping[str, int], values: Mapping[str | int, Any], source: str
) -> dict[str, str]:
    """The values of function constants by name, as expressions for the compiler.

    ``indices`` are the constants' own; ``values`` go by name or by index; ``source`` is how messages call it.
    Raises ArgumentError for a value that does not fit, or one for a constant that the source does not have.
    """
    by_index: dict[int, list[str]] = {}
    for name, index in indices.items():
        by_index.setdefault(index, []).append(name)
    result: dict[str, str] = {}
    for key, value in values.items():
        names = by_index.get(key, []) if isinstance(key, int) else [key] if key in indices else []
        if not names:
            known = ", ".join(f"'{n}' ({i})" for n, i in indices.items()) or "none"
            raise ArgumentError(f"{source} has no function constant {key!r}: it has {known}.")
        for name in names:
            result[name] = literal(found.function_constants[name], value)
    # Declarations of one index are one constant.
    for name, index in indices.items():
        twin = next((n for n in by_index[index] if n in result), None)
        if twin is not None and name not in result:
            result[name] = literal(found.function_constants[name], _value_of(values, twin, index))
    return result


def _value_of(values: Mapping[str | int, Any], name: str, index: int) -> Any:
    return values[name] if name in values else values[index]


def literal(constant: FunctionConstant, value: Any) -> str:
    """``value`` as an expression of the constant's type. Raises ArgumentError where it does not fit."""
    kind = _SPELLINGS.get(constant.type, constant.type).removeprefix("metal::")
    vector = _VECTOR.fullmatch(kind)
    if vector is None:
        return f"({constant.type})({_scalar(constant, kind, _plain(value))})"
    element, size = vector[1] or vector[3], int(vector[2] or vector[4])
    parts = _parts(value)
    if len(parts) not in (1, size):
        raise _refuse(constant, value, f"{size} numbers")
    return f"{constant.type}({', '.join(_scalar(constant, element, _plain(part)) for part in parts)})"


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, numbers.Number):
        return [value]
    try:
        return list(value.tolist() if hasattr(value, "tolist") else value)
    except TypeError:
        return [value]


def _plain(value: Any) -> Any:
    """A number of NumPy or MLX as one of Python."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else value


def _scalar(constant: FunctionConstant, kind: str, value: Any) -> str:
    if kind in _FLOATS:
        if not isinstance(value, numbers.Real):
            raise _refuse(constant, value, "a number")
        return _float(float(value))
    if kind == "bool":
        if value not in (0, 1) or not isinstance(value, numbers.Integral):
            raise _refuse(constant, value, "True or False")
        return "true" if value else "false"
    low, high = _RANGES.get(kind, (-(1 << 63), (1 << 64) - 1))
    if not isinstance(value, numbers.Integral) or (isinstance(value, bool) and kind in _RANGES):
        raise _refuse(constant, value, "an integer")
    value = int(value)
    if not low <= value <= high:
        raise _refuse(constant, value, f"an integer from {low} to {high}")
    if value == -(1 << 63):  # no literal of its own
        return "(-0x7fffffffffffffffl - 1)"
    return f"{value}ul" if value >= 1 << 63 else f"{value}l"


def _float(value: float) -> str:
    if math.isnan(value):
        return '__builtin_nanf("")'
    if math.isinf(value):
        return "-__builtin_inff()" if value < 0 else "__builtin_inff()"
    return f"{value!r}f" if "e" in repr(value) or "." in repr(value) else f"{value!r}.0f"


def _refuse(constant: FunctionConstant, value: Any, takes: str) -> ArgumentError:
    return ArgumentError(
        f"The function constant '{constant.name}' is of type {constant.type}: "
        f"it takes {takes}, not {value!r}."
    )


def edits(found: Declarations, values: Mapping[str, str], unknown: Sequence[str] = ()) -> list[Edit]:
    """The edits that give function constants their ``values``; those of ``unknown`` have none for sure.

    A constant without a value stands for storage that is nowhere defined, so that its use can be found.
    """
    numbers_ = {name: n for n, name in enumerate(found.function_constants)}
    result: list[Edit] = []
    for name, constant in found.function_constants.items():
        if constant.index_at is None and name not in unknown:
            result += constant.edits
            continue
        stem = f"{constant.type}, {numbers_[name]}"
        if name in values:
            storage = f"static constexpr const __global {constant.type} {name}__msl = {values[name]};"
            text = f"{storage} static constexpr constant auto& {name} = msl_constant({name}__msl);"
        else:
            text = f"static constant auto& {name} = msl_constant(msl_undefined<{stem}>);"
        result.append(Edit(constant.start, constant.end, text))
    for start, end, name in found.asked:
        if name in found.function_constants:
            result.append(Edit(start, end, "true" if name in values else "false"))
    return result


def tested(constant: FunctionConstant) -> bool:
    """Whether the compiler can tell if a constant made from others has a value."""
    return constant.index_at is None and constant.type in SCALAR_TYPES


def undefined(ir: str) -> set[int]:
    """Numbers of the constants without a value that code in ``ir`` uses."""
    return {int(n) for n in re.findall(r"@_Z13msl_undefinedI\w+?Lj(\d+)E\w*", ir)}
