"""From what a caller gives to what a kernel takes: one checked, contiguous buffer per parameter.

Everything that can be wrong with an argument is found here, before anything runs, and said in one
sentence that names the kernel, the buffer, what was given and what is taken.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .engines.protocol import MAX_THREADS, Argument, Geometry, Triple
from .errors import ArgumentError
from .source.declarations import Parameter
from .source.layout import Element, Field, ParameterType, StructLayout, scalar_size
from .source.program import Signature

_DTYPES = {
    name: getattr(mx, "bool_" if name == "bool" else name)
    for name in (
        "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
        "float16", "bfloat16", "float32",
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SIZES = {name: scalar_size(name) for name in _DTYPES}


@dataclass(frozen=True)
class Empty:
    """A buffer that is only written: its shape and dtype, no contents. Made by ``lab.empty``."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def empty(shape: int | Sequence[int], dtype: Any = mx.float32) -> Empty:
    """A buffer for a kernel to write: ``kernel(x, lab.empty(x.shape, mx.float32), grid=...)``.

    ``shape`` is an int or a sequence of ints, ``dtype`` an MLX or NumPy dtype. Before the kernel runs its
    contents are undefined. Raises ArgumentError for a dtype kernels have no type for.
    """
    sizes = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    if any(not isinstance(n, numbers.Integral) or n < 0 for n in sizes):
        raise ArgumentError(f"lab.empty takes a shape of non-negative ints, not {shape!r}.")
    name = _NAMES.get(dtype) if isinstance(dtype, mx.Dtype) else None
    if name is None and not isinstance(dtype, mx.Dtype):
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = str(dtype)
    if name not in _DTYPES:
        raise ArgumentError(f"lab.empty takes {', '.join(_DTYPES)}, not {dtype}.")
    return Empty(tuple(int(n) for n in sizes), name)


@dataclass(frozen=True)
class Slot:
    """A buffer parameter of a kernel, and how messages call it."""

    kernel: str
    parameter: Parameter
    type: ParameterType
    structs: Mapping[str, StructLayout]
    written: bool
    index: int

    @property
    def element(self) -> Element:
        return self.type.element

    @property
    def single(self) -> bool:
        """Whether it takes one value: a reference."""
        return self.type.indirection == "&"

    def refuse(self, got: Any, why: str = "") -> ArgumentError:
        """The error for ``got``: a value, or words for one."""
        reason = f": {why}" if why else ""
        got = got if isinstance(got, str) else _shown(got)
        return ArgumentError(
            f"Kernel '{self.kernel}', buffer({self.index}) '{self.parameter.name}' "
            f"takes {self.type}, got {got}{reason}."
        )

    def argument(
        self,
        memory: np.ndarray | None,
        nbytes: int,
        owner: Any = None,
        shape: tuple[int, ...] = (),
        dtype: str | np.dtype = "uint8",
    ) -> Argument:
        return Argument(
            index=self.index,
            name=self.parameter.name,
            written=self.written,
            nbytes=nbytes,
            memory=memory,
            owner=owner,
            shape=shape,
            dtype=dtype,
            element_size=max(1, self.element.size),
        )


def slots(kernel: Signature) -> dict[str, Slot]:
    """What each buffer of ``kernel`` takes, in the order of their index."""
    return {
        p.name: Slot(kernel.name, p, kernel.types[p.name], kernel.structs, kernel.writes(p), p.index or 0)
        for p in kernel.buffers
    }


def bind(
    kernel: str,
    slots: Mapping[str, Slot],
    positional: Sequence[Any],
    named: Mapping[str, Any],
    out: Any,
    *,
    in_place: bool,
) -> list[Argument]:
    """One argument per buffer, in index order. Raises ArgumentError."""
    if len(positional) == len(slots) and not named and out is None:
        pairs = zip(slots.values(), positional, strict=True)
        return [_argument(slot, value, in_place) for slot, value in pairs]
    given: dict[str, Any] = {}
    for name, value in named.items():
        if name not in slots:
            raise ArgumentError(
                f"Kernel '{kernel}' has no buffer called '{name}': its buffers are {_listed(slots)}."
            )
        given[name] = value
    if out is not None:
        _bind_out(kernel, slots, given, out)
    free = [name for name in slots if name not in given]
    if len(positional) > len(free):
        raise ArgumentError(
            f"Kernel '{kernel}' takes {len(slots)} buffers ({_listed(slots)}), "
            f"got {len(positional) + len(given)} arguments."
        )
    given.update(zip(free, positional, strict=False))
    lacking = [name for name in slots if name not in given]
    if lacking:
        what = "is" if len(lacking) == 1 else "are"
        names = ", ".join(f"buffer({slots[n].index}) '{n}' ({slots[n].type})" for n in lacking)
        only_written = " (lab.empty(shape, dtype) serves for a buffer that is only written)"
        hint = only_written if slots[lacking[0]].written else ""
        raise ArgumentError(f"Kernel '{kernel}': {names} {what} missing{hint}.")
    return [_argument(slot, given[name], in_place) for name, slot in slots.items()]


def _bind_out(kernel: str, slots: Mapping[str, Slot], given: dict[str, Any], out: Any) -> None:
    if "out" in slots and not isinstance(out, Mapping | list | tuple):
        given["out"] = out
        return
    written = [name for name, slot in slots.items() if slot.written and name not in given]
    if isinstance(out, Mapping):
        for name, value in out.items():
            if name not in slots or not slots[name].written:
                raise ArgumentError(
                    f"Kernel '{kernel}' writes no buffer called '{name}': "
                    f"it writes {_listed(dict.fromkeys(written))}."
                )
            given[name] = value
        return
    values = list(out) if isinstance(out, list | tuple) else [out]
    if len(values) != len(written):
        raise ArgumentError(
            f"Kernel '{kernel}' writes {len(written)} buffers ({_listed(dict.fromkeys(written))}), "
            f"out= has {len(values)}."
        )
    given.update(zip(written, values, strict=True))


def _listed(names: Mapping[str, Any]) -> str:
    return ", ".join(f"'{n}'" for n in names) or "none"


# ---- one argument --------------------------------------------------------------------------------------


def _argument(slot: Slot, value: Any, in_place: bool) -> Argument:
    if isinstance(value, mx.array):
        return _from_mlx(slot, value, in_place)
    if isinstance(value, Empty):
        if in_place and slot.written:
            raise slot.refuse("lab.empty", "the in-place form writes into arrays that exist")
        if not slot.written:
            raise slot.refuse("lab.empty", "the kernel only reads this buffer")
        _check_elements(slot, value.dtype, value.size, value)
        return slot.argument(None, value.size * scalar_size(value.dtype), None, value.shape, value.dtype)
    if isinstance(value, np.ndarray | np.void):  # void: one record
        return _from_numpy(slot, np.asarray(value), in_place)
    if in_place and slot.written:
        raise slot.refuse(_shown(value), "the in-place form writes into MLX or NumPy arrays")
    data = _pack_value(slot, value)
    memory = np.frombuffer(data, np.uint8)
    if slot.written:
        shape = () if isinstance(value, numbers.Number) else (memory.size // scalar_size(slot.element.dtype),)
        return slot.argument(memory, memory.size, None, shape, slot.element.dtype)
    return slot.argument(memory, memory.size, data)


def _from_mlx(slot: Slot, value: mx.array, in_place: bool) -> Argument:
    dtype = _NAMES.get(value.dtype)
    if dtype is None:
        raise slot.refuse(value, "kernels have no type for its dtype")
    _check_elements(slot, dtype, value.size, value)
    if value.size == 0:
        return slot.argument(np.empty(0, np.uint8), 0, value, value.shape, dtype)
    view = np.asarray(value.view(mx.uint16) if dtype == "bfloat16" else value)
    if not view.flags.c_contiguous:
        if in_place and slot.written:
            raise slot.refuse(value, "the in-place form needs a contiguous array, this one is a strided view")
        value = mx.contiguous(value)
        view = np.asarray(value.view(mx.uint16) if dtype == "bfloat16" else value)
    return slot.argument(view.reshape(-1).view(np.uint8), view.nbytes, (value, view), value.shape, dtype)


def _from_numpy(slot: Slot, value: np.ndarray, in_place: bool) -> Argument:
    if value.dtype.names is not None:
        return _from_records(slot, value, in_place)
    if value.dtype.name not in _DTYPES:
        if value.dtype == np.float64 and not slot.element.struct:
            raise slot.refuse(value, _conversion(value, slot.element.dtype))
        raise slot.refuse(value, "kernels have no type for its dtype")
    if not value.dtype.isnative:
        raise slot.refuse(value, "its bytes are in the other order")
    _check_elements(slot, value.dtype.name, value.size, value)
    if in_place and slot.written and not (value.flags.c_contiguous and value.flags.writeable):
        raise slot.refuse(value, "the in-place form needs a contiguous array that can be written")
    array = np.ascontiguousarray(value)
    memory = array.reshape(-1).view(np.uint8)
    return slot.argument(memory, array.nbytes, (value, array), value.shape, value.dtype.name)


def _from_records(slot: Slot, value: np.ndarray, in_place: bool) -> Argument:
    layout = slot.structs.get(slot.element.struct)
    if layout is None:
        raise slot.refuse(value, "a record fits a struct only")
    if slot.single and value.size != 1:
        raise slot.refuse(value, "a reference takes one record")
    if _laid_out(value.dtype, layout, slot.structs):
        array = np.ascontiguousarray(value)
        if in_place and slot.written and not (value.flags.c_contiguous and value.flags.writeable):
            raise slot.refuse(value, "the in-place form needs a contiguous array that can be written")
        memory = array.reshape(-1).view(np.uint8)
        return slot.argument(memory, array.nbytes, (value, array), value.shape, value.dtype)
    if in_place and slot.written:
        raise slot.refuse(value, f"its layout is not that of {layout.name}")
    data = b"".join(_pack_struct(slot, layout, _as_mapping(record)) for record in value.reshape(-1))
    return slot.argument(np.frombuffer(data, np.uint8), len(data), data, (*value.shape, layout.size))


def _laid_out(dtype: np.dtype, layout: StructLayout, structs: Mapping[str, StructLayout]) -> bool:
    """Whether records of ``dtype`` lie in memory as the struct does, field by field."""
    fields: Mapping[str, Any] = dtype.fields or {}
    if dtype.itemsize != layout.size or set(fields) != {f.name for f in layout.fields}:
        return False
    for f in layout.fields:
        kind, offset = fields[f.name][:2]
        inner = structs.get(f.element.struct)
        exact = kind.itemsize == f.element.size * f.element.count
        unpadded = kind.itemsize == f.element.components * scalar_size(f.element.dtype)
        if offset != f.offset or not (exact or (unpadded and f.element.count == f.element.columns == 1)):
            return False
        same = kind.base.name == f.element.dtype and kind.base.isnative
        if not (_laid_out(kind.base, inner, structs) if inner is not None else same):
            return False
    return True


def _as_mapping(record: np.void) -> dict[str, Any]:
    """A record as a mapping, records within it too."""

    def item(value: Any) -> Any:
        if getattr(value, "dtype", None) is None or value.dtype.names is None:
            return value
        return [_as_mapping(v) for v in value.reshape(-1)] if value.ndim else _as_mapping(value)

    return {name: item(record[name]) for name in record.dtype.names or ()}


def _check_elements(slot: Slot, dtype: str, size: int, value: Any) -> None:
    """Whether ``size`` scalars of ``dtype`` are a whole number of the parameter's elements, and enough."""
    element = slot.element
    if element.struct:
        if dtype not in ("uint8", "int8"):
            raise slot.refuse(value, _forms(slot))
    elif dtype != element.dtype and element.scalar != "void":
        raise slot.refuse(value, _conversion(value, element.dtype))
    nbytes = size * _SIZES[dtype]
    if nbytes % (element.size or 1):
        unit = f"{element.lanes} {element.dtype} values" if element.lanes > 1 else f"{element.size} bytes"
        room = f", the room of one {element}" if element.lanes > element.components * element.columns else ""
        raise slot.refuse(value, f"its size must be a multiple of {unit}{room}")
    if slot.single and nbytes < element.size * element.count:
        raise slot.refuse(value, f"it holds {nbytes} bytes and {element.size * element.count} are read")


def _conversion(value: Any, dtype: str) -> str:
    """How to make an array of ``dtype`` of ``value``."""
    dtype = "bool_" if dtype == "bool" else dtype
    if isinstance(value, Empty):
        return f"give lab.empty a dtype of mx.{dtype}"
    if isinstance(value, np.ndarray) and dtype == "bfloat16":
        return "NumPy has no such dtype: use mx.array(...).astype(mx.bfloat16)"
    wanted = f"{'np' if isinstance(value, np.ndarray) else 'mx'}.{dtype}"
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        return f"use .astype({wanted})"
    return f"use .astype({wanted}) or, for the same bits, .view({wanted})"


# ---- values --------------------------------------------------------------------------------------------


def _pack_value(slot: Slot, value: Any) -> bytes:
    element = slot.element
    if isinstance(value, Mapping):
        layout = slot.structs.get(element.struct)
        if layout is None:
            raise slot.refuse("a mapping", _forms(slot) if element.struct else "a mapping fits a struct only")
        return _pack_struct(slot, layout, value)
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        size = element.size * element.count
        if slot.single and len(data) != size:
            raise slot.refuse(f"{len(data)} bytes", f"it is {size} bytes")
        if len(data) % max(1, size):
            raise slot.refuse(f"{len(data)} bytes", f"an element is {size} bytes")
        return data
    if element.struct:
        layout = slot.structs.get(element.struct)
        if layout is not None and isinstance(value, Sequence) and all(isinstance(v, Mapping) for v in value):
            if slot.single and len(value) != element.count:
                raise slot.refuse(f"{len(value)} mappings")
            return b"".join(_pack_struct(slot, layout, v) for v in value)
        raise slot.refuse(value, _forms(slot))
    if element.scalar == "void":
        raise slot.refuse(_shown(value), "give an array")
    count = element.count if slot.single else None
    return _pack_element(slot, element, value, count, "")


def _forms(slot: Slot) -> str:
    """In what forms a struct can be given."""
    if slot.element.struct in slot.structs:
        fields = ", ".join(f.name for f in slot.structs[slot.element.struct].fields)
        return f"give a mapping of its fields ({fields}), a NumPy record of them, or its bytes"
    return f"its fields are not known here, so give its bytes ({slot.element.size} an element)"


def _pack_struct(slot: Slot, layout: StructLayout, value: Mapping[str, Any]) -> bytes:
    known = {f.name for f in layout.fields}
    given = [f for f in layout.fields if f.name in value]
    # Of a union's members one is enough: those that share bytes with a given one may be left out.
    lacking = {f.name for f in layout.fields if f not in given and not any(_overlap(f, g) for g in given)}
    extra = set(value) - known
    if lacking or extra:
        parts = []
        if lacking:
            parts.append(f"lacks {', '.join(sorted(lacking))}")
        if extra:
            parts.append(f"has {', '.join(sorted(map(str, extra)))}, which {layout.name} does not")
        raise slot.refuse("a mapping that " + " and ".join(parts))
    data = bytearray(layout.size)
    for field in given:
        inner = slot.structs.get(field.element.struct)
        item = value[field.name]
        if inner is not None:
            items = [item] if isinstance(item, Mapping) else list(item)
            if len(items) != field.element.count:
                raise slot.refuse(
                    f"{len(items)} values for {layout.name}.{field.name}", f"it takes {field.element.count}"
                )
            packed = b"".join(_pack_struct(slot, inner, i) for i in items)
        elif field.element.struct:
            if not isinstance(item, bytes | bytearray | memoryview):
                raise slot.refuse(f"{_shown(item)} for {layout.name}.{field.name}", "give its bytes")
            packed = bytes(item)
        else:
            packed = _pack_element(
                slot, field.element, item, field.element.count, f" for {layout.name}.{field.name}"
            )
        if len(packed) > field.element.size * field.element.count:
            raise slot.refuse(f"{len(packed)} bytes for {layout.name}.{field.name}")
        data[field.offset : field.offset + len(packed)] = packed
    return bytes(data)


def _overlap(a: Field, b: Field) -> bool:
    ends = (f.offset + f.element.size * f.element.count for f in (a, b))
    return max(a.offset, b.offset) < min(ends)


def _pack_element(slot: Slot, element: Element, value: Any, count: int | None, of: str) -> bytes:
    """A scalar, vector or list of them as bytes, each element padded as the compiler pads it."""
    if isinstance(value, mx.array):
        value = np.asarray(value.astype(mx.float32) if value.dtype == mx.bfloat16 else value)
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.empty(0, object)
    if array.dtype.kind not in "biuf":
        raise slot.refuse(_shown(value) + of, "a number or a list of numbers fits")
    per_element = element.components * element.columns
    wanted = None if count is None else per_element * count
    if array.size % per_element or (wanted is not None and array.size != wanted):
        need = _counted(wanted) if wanted is not None else f"a multiple of {per_element} numbers"
        raise slot.refuse(f"{_counted(array.size)}{of}", f"it takes {need}")
    flat = _as_scalars(slot, element, array.reshape(-1), _shown(value) + of)
    rows = flat.reshape(-1, element.columns, element.components)
    padded = np.zeros((rows.shape[0], element.columns, element.lanes // element.columns), flat.dtype)
    padded[:, :, : element.components] = rows
    return padded.tobytes()


def _counted(numbers: int) -> str:
    return "1 number" if numbers == 1 else f"{numbers} numbers"


def _as_scalars(slot: Slot, element: Element, array: np.ndarray, shown: str) -> np.ndarray:
    if element.dtype == "bfloat16":
        return np.asarray(mx.array(array.astype(np.float32)).astype(mx.bfloat16).view(mx.uint16))
    target = np.dtype("bool" if element.dtype == "bool" else element.dtype)
    if target.kind in "iu":
        if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.trunc(array)).all()):
            raise slot.refuse(shown, f"it is not a whole number, and {element.scalar} holds whole numbers")
        limits = np.iinfo(target)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise slot.refuse(shown, f"{element.scalar} holds {limits.min} to {limits.max}")
    with np.errstate(over="ignore"):
        return array.astype(target)


def _shown(value: Any) -> str:
    """A value in words: a number as it is, an array by dtype and shape, anything else by its type."""
    if isinstance(value, mx.array):
        return f"an array of {str(value.dtype).rsplit('.', 1)[-1]}, shape {value.shape}"
    if isinstance(value, Empty):
        return f"lab.empty({value.shape}, {value.dtype})"
    if isinstance(value, np.ndarray):
        return f"a NumPy array of {value.dtype}, shape {value.shape}"
    if isinstance(value, bool | int | float | np.generic):
        return repr(value)
    text = repr(value) if isinstance(value, list | tuple | str) else ""
    kind = type(value).__name__
    if value is None:
        return "None"
    return f"a {kind} {text}" if text and len(text) < 60 else f"a {kind}"


# ---- the size of a dispatch ----------------------------------------------------------------------------


def geometry(kernel: str, grid: Any, groups: Any, threadgroup: Any) -> Geometry:
    """The size of a dispatch from ``grid=`` (threads) or ``groups=`` (threadgroups). Raises ArgumentError."""
    sizes = (tuple(s) if isinstance(s, list) else s for s in (grid, groups, threadgroup))
    try:
        return _geometry(kernel, *sizes)
    except TypeError as problem:
        if isinstance(problem, ArgumentError):
            raise
        raise ArgumentError(f"Kernel '{kernel}': a size is an int or a tuple of one to three ints.") from None


@functools.lru_cache(maxsize=512, typed=True)
def _geometry(kernel: str, grid: Any, groups: Any, threadgroup: Any) -> Geometry:
    if (grid is None) == (groups is None):
        raise ArgumentError(
            f"Kernel '{kernel}': give its size either as grid= (threads) or as groups= (threadgroups)"
            + (", not both." if grid is not None else ".")
        )
    size = _triple(kernel, "grid" if groups is None else "groups", grid if groups is None else groups)
    if threadgroup is None:
        if groups is not None:
            group: Triple = (256, 1, 1)
        elif size[1] == size[2] == 1:
            group = (max(1, min(size[0], 256)), 1, 1)
        else:
            x = max(1, min(size[0], 32))
            group = (x, max(1, min(size[1], 256 // x)), 1)
    else:
        group = _triple(kernel, "threadgroup", threadgroup)
    if min(group) < 1:
        raise ArgumentError(
            f"Kernel '{kernel}': threadgroup={_plain(group)} has an extent of 0; the least is 1."
        )
    threads = group[0] * group[1] * group[2]
    if threads > MAX_THREADS:
        raise ArgumentError(
            f"Kernel '{kernel}': threadgroup={_plain(group)} is {threads} threads; "
            f"a threadgroup has at most {MAX_THREADS}."
        )
    if groups is not None:
        size = (size[0] * group[0], size[1] * group[1], size[2] * group[2])
    if max(size) >= 1 << 32:
        raise ArgumentError(
            f"Kernel '{kernel}': a grid of {_plain(size)} threads is beyond 2^32 - 1 along an axis."
        )
    return Geometry(size, group)


def _triple(kernel: str, what: str, value: Any) -> Triple:
    parts = (value,) if isinstance(value, numbers.Integral) else value
    try:
        sizes = tuple(parts)
    except TypeError:
        sizes = (None,)
    if not 1 <= len(sizes) <= 3 or any(
        not isinstance(n, numbers.Integral) or isinstance(n, bool) or n < 0 for n in sizes
    ):
        raise ArgumentError(
            f"Kernel '{kernel}': {what}= takes an int or a tuple of one to three ints, none below 0, "
            f"not {value!r}."
        )
    x, y, z = (*map(int, sizes), 1, 1)[:3]
    return x, y, z


def _plain(size: Triple) -> str:
    return str(size[0]) if size[1] == size[2] == 1 else str(size)
