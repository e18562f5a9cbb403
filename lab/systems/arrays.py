"""What a system is given, as arrays that its kernels take."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import ArgumentError


def as_array(name: str, value: Any, shape: tuple[int, ...], dtype: str = "float32") -> mx.array:
    """``value`` as a contiguous MLX array of ``shape``. Raises ArgumentError for another shape.

    MLX arrays of the dtype are taken as they are; others are converted.
    """
    if not isinstance(value, mx.array):
        value = mx.array(np.ascontiguousarray(value, dtype))
    kind = getattr(mx, dtype)
    if value.shape != shape:
        raise ArgumentError(f"{name} has the shape {value.shape}; it takes {shape}.")
    if value.dtype != kind:
        value = value.astype(kind)
    return mx.contiguous(value)
