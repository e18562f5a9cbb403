"""A system of three kernels and a host operation, small enough to know every value by heart."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from lab import systems
from lab.systems.plan import INPUT, OUTPUT, SCRATCH, STATE

ARGS = systems.Block("Args", (("n", "uint32"), ("first", "uint32"), ("factor", "float32")))

SHIPPED = """#include <metal_stdlib>
using namespace metal;
struct Args { uint n; uint first; float factor; };

// y = factor * x, for the n elements from first on.
kernel void toy_scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                      constant Args& u [[buffer(2)]], uint i [[thread_position_in_grid]])
{
    y[i] = u.factor * x[u.first + i];
}

kernel void toy_add(device const float* z [[buffer(0)]], device float* sum [[buffer(1)]],
                    device uint* count [[buffer(2)]], constant Args& u [[buffer(3)]],
                    uint i [[thread_position_in_grid]])
{
    sum[i] += z[i];
    if (i == 0) {
        count[0] += u.n;
    }
}

kernel void toy_out(device const float* sum [[buffer(0)]], device float* out [[buffer(1)]],
                    constant Args& u [[buffer(2)]], uint i [[thread_position_in_grid]])
{
    out[u.first + i] = sum[i];
}
"""

CONTRACTS = {
    contract.kernel: contract
    for contract in (
        systems.Contract("toy_scale", ("x", "y", "u"), ("y",)),
        systems.Contract("toy_add", ("z", "sum", "count", "u"), ("sum", "count")),
        systems.Contract("toy_out", ("sum", "out", "u"), ("out",)),
    )
}
TYPES: dict[str, str | systems.Block] = {
    **dict.fromkeys(("x", "y", "z", "sum", "out"), "float32"),
    "count": "uint32",
    "u": ARGS,
}


def square(dispatch: systems.Dispatch, arrays: Mapping[str, Any], engine: str) -> Mapping[str, Any]:
    """z = y * y, on the host."""
    return {"z": arrays["y"] * arrays["y"]}


def system(folder: Path) -> systems.System:
    """The system, its shipped file put into ``folder``."""
    path = folder / "toy.metal"
    path.write_text(SHIPPED)
    return systems.System("toy", (systems.Source(path),), CONTRACTS, TYPES, {"square": square})


def plan(n: int, first: int = 0, total: int | None = None, factor: float = 3.0) -> systems.Plan:
    """out[first + i] = sum[i] += (factor x[first + i])^2, for n elements."""
    u = {"u": {"n": n, "first": first, "factor": factor}}
    size: dict[str, Any] = {"grid": (n, 1, 1), "threadgroup": (32, 1, 1)}
    element, rows = (("element", n),), (("element", total or first + n),)
    near = {"tolerance": 4.0, "why": "two products"}

    def floats(name: str, role: str, terms: Any, **tolerance: Any) -> systems.Buffer:
        return systems.Buffer.whole(name, "float32", (terms[0][1],), role, terms, **tolerance)

    buffers = (
        floats("x", INPUT, rows),
        floats("y", SCRATCH, element, **near),
        floats("z", SCRATCH, element, **near),
        floats("sum", STATE, element, **near),
        systems.Buffer.whole("count", "uint32", (1,), STATE, (("counter", 1),)),
        floats("out", OUTPUT, rows, **near),
    )
    dispatches = (
        CONTRACTS["toy_scale"].dispatch(u, **size),
        systems.Dispatch("square", ("y", "z"), ("z",), host="square"),
        CONTRACTS["toy_add"].dispatch(u, **size),
        CONTRACTS["toy_out"].dispatch(u, **size),
    )
    return systems.Plan("only", first, n, dispatches, {b.name: b for b in buffers})


def arrays(x: np.ndarray, n: int) -> dict[str, mx.array]:
    """The buffers of a sequence ``x`` in chunks of ``n``, at its start."""
    made = {
        "x": mx.array(x),
        "sum": mx.zeros(n),
        "count": mx.zeros(1, dtype=mx.uint32),
        "out": mx.zeros(len(x)),
    }
    mx.eval(*made.values())
    return made


def reference(trace: systems.Trace, chunk: int) -> Mapping[str, Mapping[str, systems.Expected]]:
    """What the dispatches of a chunk should write, from all of x."""
    done = trace.chunks[chunk].plan
    x = trace.buffers_at(0)["x"].astype(float).reshape(-1, done.rows)
    y = 3.0 * x[chunk]
    total = (9 * x[: chunk + 1] ** 2).sum(0)
    out = np.zeros(x.shape)
    out[chunk] = total

    def exactly(value: np.ndarray, defined: Any = True) -> systems.Expected:
        return systems.Expected(value, np.broadcast_to(defined, value.shape), np.abs(value.astype(float)))

    return {
        "toy_scale": {"y": exactly(y)},
        "square": {"z": exactly(y * y)},
        "toy_add": {
            "sum": exactly(total),
            "count": systems.Expected(np.array([(chunk + 1) * done.rows]), np.ones(1, bool), np.zeros(1)),
        },
        "toy_out": {"out": exactly(out.reshape(-1), np.repeat(np.arange(len(x)) == chunk, done.rows))},
    }


def chunks(x: np.ndarray, n: int) -> list[systems.Plan]:
    """Plans for all of ``x``."""
    return [plan(n, first, len(x)) for first in range(0, len(x), n)]
