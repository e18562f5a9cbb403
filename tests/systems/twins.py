"""A system with constants: kernels compiled for a plan's macros, one of them run on two sets of buffers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from lab import systems
from lab.systems.plan import INPUT, OUTPUT

FIRST = """#include <metal_stdlib>
using namespace metal;
#ifndef TIMES
#define TIMES 2
#endif
inline float scaled(float x) { return TIMES * x; }

// to[first + i] = TIMES * from[i]
kernel void twins_scale(device const float* from [[buffer(0)]], device float* to [[buffer(1)]],
                        constant uint& first [[buffer(2)]], uint i [[thread_position_in_grid]])
{
    to[first + i] = scaled(from[i]);
}
"""

# Compiled after the first, as QSA's second file is.
SECOND = """
#ifndef PLUS
#define PLUS 10
#endif

kernel void twins_add(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                      device float* out [[buffer(2)]], uint i [[thread_position_in_grid]])
{
    out[i] = a[i] + b[i] + scaled(PLUS);
}
"""

N, ROOM = 3, 5
CONTRACTS = {
    "twins_scale": systems.Contract("twins_scale", ("from", "to", "first"), ("to",)),
    "twins_add": systems.Contract("twins_add", ("a", "b", "out"), ("out",)),
}


def whole(dispatch: systems.Dispatch, arrays: Mapping[str, np.ndarray]) -> str:
    """Results may not be negative."""
    low = np.argwhere(arrays["out"] < 0)
    return f"{dispatch.kernel} gave {arrays['out'][low[0, 0]]} for element {low[0, 0]}." if len(low) else ""


def system(folder: Path) -> systems.System:
    """The system, its shipped files put into ``folder``."""
    first, second = folder / "first.metal", folder / "second.metal"
    first.write_text(FIRST)
    second.write_text(SECOND)
    floats: dict[str, Any] = dict.fromkeys(("from", "to", "a", "b", "out"), "float32")
    return systems.System(
        "twins",
        (
            systems.Source(first, macros=("TIMES",)),
            systems.Source(second, include=(first,), macros=("TIMES", "PLUS")),
        ),
        CONTRACTS,
        {**floats, "first": systems.Scalar("uint32")},
        checks={"twins_add": whole},
    )


def plan(first: int = 1, **defines: int) -> systems.Plan:
    """out = a + b + TIMES * PLUS, where a and b are TIMES x and TIMES y from element ``first`` on."""
    size: dict[str, Any] = {"grid": (N, 1, 1), "threadgroup": (32, 1, 1)}
    scale = CONTRACTS["twins_scale"]
    dispatches = (
        scale.dispatch({"first": first}, **size, names={"from": "x", "to": "a"}),
        scale.dispatch({"first": first}, **size, names={"from": "y", "to": "b"}),
        CONTRACTS["twins_add"].dispatch({}, grid=(ROOM, 1, 1), threadgroup=(32, 1, 1)),
    )
    sizes = {"x": (N, INPUT), "y": (N, INPUT), **dict.fromkeys("ab", (ROOM, "state")), "out": (ROOM, OUTPUT)}
    buffers = {
        name: systems.Buffer.whole(name, "float32", (n,), role, (("element", n),), 2.0, "a product and a sum")
        for name, (n, role) in sizes.items()
    }
    return systems.Plan("only", 0, N, dispatches, buffers, defines)


def arrays() -> dict[str, mx.array]:
    """All buffers: x is 1 2 3, y is 100 200 300."""
    x = mx.array([1.0, 2.0, 3.0])
    made = {"x": x, "y": 100 * x, **{name: mx.zeros(ROOM) for name in ("a", "b", "out")}}
    mx.eval(*made.values())
    return made


def expected(times: int, plus: int) -> list[float]:
    """``out`` for these constants."""
    return [times * plus + times * 101.0 * i for i in (0, 1, 2, 3, 0)]
