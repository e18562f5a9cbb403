"""The kernel that MLX makes around a body: its name, its parameters, its text.

What appears in the signature follows from the body's text and from the arrays of a call, by the rules of
``mx.fast.metal_kernel``; the text is MLX's, to the letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

SMALL = 8  # inputs of fewer elements are in constant memory

TYPES = {
    mx.float32: "float",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float64: "double",
    mx.complex64: "complex64_t",
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
}
"""What a dtype is called in a kernel."""

_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": "uint",
    "dispatch_simdgroups_per_threadgroup": "uint",
    "dispatch_threads_per_threadgroup": "uint3",
    "grid_origin": "uint3",
    "grid_size": "uint3",
    "quadgroup_index_in_threadgroup": "uint",
    "quadgroups_per_threadgroup": "uint",
    "simdgroup_index_in_threadgroup": "uint",
    "simdgroups_per_threadgroup": "uint",
    "thread_execution_width": "uint",
    "thread_index_in_quadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}

TemplateValue = bool | int | mx.Dtype


@dataclass(frozen=True)
class Input:
    """An input as the signature sees it: dtype, whether it has no dimensions, whether it is small."""

    dtype: mx.Dtype
    scalar: bool
    small: bool


@dataclass(frozen=True)
class Body:
    """What a kernel is made from: its names, the text of its body and what comes before it."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str = ""
    atomic_outputs: bool = False

    @property
    def extras(self) -> tuple[tuple[str, ...], ...]:
        """For each input, which of ``shape``, ``strides`` and ``ndim`` the body asks for."""
        known = ("shape", "strides", "ndim")
        return tuple(tuple(k for k in known if f"{name}_{k}" in self.source) for name in self.inputs)

    @property
    def attributes(self) -> tuple[str, ...]:
        """The thread attributes whose names occur in the body."""
        return tuple(name for name in _ATTRIBUTES if name in self.source)


@dataclass(frozen=True)
class Generated:
    """A kernel's text: ``head`` (which begins with the user's header), the user's body, ``tail``."""

    name: str
    head: str
    source: str
    tail: str

    @property
    def text(self) -> str:
        return self.head + self.source + self.tail


def generate(
    body: Body,
    inputs: Sequence[Input],
    outputs: Sequence[mx.Dtype],
    template: Sequence[tuple[str, TemplateValue]] = (),
) -> Generated:
    """The kernel for a call with these inputs, output dtypes and template arguments, as MLX writes it."""
    values = [_template_value(v) for _, v in template]
    name = f"custom_kernel_{body.name}"
    if template:
        name += "__" + "_".join(v.replace("-", "_") for v in values)
    for x in inputs:
        name += f"_{TYPES[x.dtype]}{'s' if x.scalar else 'c' if x.small else ''}"
    name += "".join(f"_{TYPES[dtype]}" for dtype in outputs)

    head = body.header
    if template:
        kinds = ", ".join(f"{_template_kind(v)} {n}" for n, v in template)
        head += f"template <{kinds}>\n"
    head += f"[[kernel]] void {name}(\n"
    index = 0
    for x, called, extras in zip(inputs, body.inputs, body.extras, strict=True):
        space = "constant" if x.small else "device"
        head += f"  const {space} {TYPES[x.dtype]}{'&' if x.scalar else '*'} {called} [[buffer({index})]],\n"
        index += 1
        for extra in () if x.scalar else extras:
            head += f"  const constant {_EXTRA_TYPES[extra]} {called}_{extra} [[buffer({index})]],\n"
            index += 1
    attributes = [f"  {_ATTRIBUTES[a]} {a} [[{a}]]" for a in body.attributes]
    last = len(inputs) + len(outputs) - 1  # as MLX counts, which leaves shapes and strides out
    for dtype, called in zip(outputs, body.outputs, strict=True):
        kind = f"atomic<{TYPES[dtype]}>" if body.atomic_outputs else TYPES[dtype]
        end = ",\n" if index < last or attributes else ") {\n"
        head += f"  device {kind}* {called} [[buffer({index})]]{end}"
        index += 1
    if attributes:
        head += ",\n".join(attributes) + ") {\n"

    tail = "\n}\n"
    if template:
        instance = f"{name}<{', '.join(values)}>"
        tail += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
    return Generated(name, head, body.source, tail)


_EXTRA_TYPES = {"shape": "int*", "strides": "int64_t*", "ndim": "int&"}


def _template_kind(value: TemplateValue) -> str:
    return "typename" if isinstance(value, mx.Dtype) else "bool" if isinstance(value, bool) else "int"


def _template_value(value: TemplateValue) -> str:
    return TYPES[value] if isinstance(value, mx.Dtype) else str(int(value))
