"""What an example is, and how it is judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .. import resources
from ..kernel import Kernel, Library, compile

Inputs = Mapping[str, Any]


@dataclass(frozen=True)
class Example:
    """One kernel with a way to feed, call and judge it.

    ``draw(rng)`` makes NumPy inputs by name; ``call(kernel, inputs)`` gives the kernel's result as an MLX
    array; ``reference(inputs)`` the same in float64 (integers: exact). ``tolerance`` bounds the largest
    error relative to the largest reference value; 0 means equal.
    """

    name: str
    file: str
    kernel: str
    about: str
    draw: Callable[[np.random.Generator], Inputs]
    call: Callable[[Kernel, Inputs], mx.array]
    reference: Callable[[Inputs], np.ndarray]
    tolerance: float

    def library(self, engine: str = "auto") -> Library:
        """The compiled file of the example."""
        return compile(resources.kernels() / "examples" / self.file, engine=engine)


@dataclass(frozen=True)
class Outcome:
    """How an example came out: its largest error, absolute over the largest reference value."""

    example: Example
    error: float
    elements: int

    @property
    def right(self) -> bool:
        return self.error <= self.example.tolerance


def check(example: Example, seed: int, engine: str = "auto") -> Outcome:
    """Run ``example`` on inputs from ``seed`` and compare it with its reference."""
    inputs = example.draw(np.random.default_rng(seed))
    got = np.asarray(example.call(example.library(engine)[example.kernel], inputs)).astype(np.float64)
    wanted = np.asarray(example.reference(inputs), np.float64)
    if got.shape != wanted.shape:
        raise AssertionError(f"{example.name}: shape {got.shape}, not {wanted.shape}")
    scale = float(np.abs(wanted).max(initial=0.0)) or 1.0
    error = float(np.abs(got - wanted).max(initial=0.0)) / scale
    return Outcome(example, error if np.isfinite(error) else np.inf, got.size)
