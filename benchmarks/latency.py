"""From a cell to its result: a new kernel, the same cell again, and a call that does almost nothing.

Times are medians over fresh kernels (each with a constant of its own, so that nothing comes from a cache).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time

import mlx.core as mx
import numpy as np

import lab

_NEW = itertools.count(int(time.time() * 1000) % 1_000_000)

# Forty lines, as one writes them: a struct, a helper, a loop, a branch.
SOURCE = """#include <metal_stdlib>
using namespace metal;

struct Args {
    uint rows;
    uint columns;
    float scale;
    float bias;
};

static inline float squash(float x, float limit)
{
    if (x > limit) {
        return limit + (x - limit) * 0.125f;
    }
    if (x < -limit) {
        return -limit + (x + limit) * 0.125f;
    }
    return x;
}

kernel void row_score(device const float* x [[buffer(0)]],
                      device const float* w [[buffer(1)]],
                      device float* out [[buffer(2)]],
                      constant Args& args [[buffer(3)]],
                      uint row [[thread_position_in_grid]])
{
    if (row >= args.rows) {
        return;
    }
    device const float* mine = x + row * args.columns;
    float4 acc = 0.0f;
    uint i = 0;
    for (; i + 4 <= args.columns; i += 4) {
        acc += float4(mine[i], mine[i + 1], mine[i + 2], mine[i + 3])
             * float4(w[i], w[i + 1], w[i + 2], w[i + 3]);
    }
    float sum = acc.x + acc.y + acc.z + acc.w + %d.0f;
    for (; i < args.columns; i++) {
        sum += mine[i] * w[i];
    }
    out[row] = squash(sum * args.scale + args.bias, 4.0f);
}
"""


def new_cell() -> float:
    """Seconds from a source never seen to its result."""
    x, w = mx.array(np.ones((64, 130), np.float32)), mx.array(np.ones(130, np.float32))
    mx.eval(x, w)
    source = SOURCE % next(_NEW)
    started = time.perf_counter()
    _call(source, x, w)
    return time.perf_counter() - started


def same_cell() -> float:
    """Seconds for a source compiled before in this process."""
    x, w = mx.array(np.ones((64, 130), np.float32)), mx.array(np.ones(130, np.float32))
    mx.eval(x, w)
    source = SOURCE % 0
    _call(source, x, w)
    started = time.perf_counter()
    _call(source, x, w)
    return time.perf_counter() - started


def _call(source: str, x: mx.array, w: mx.array) -> mx.array:
    args = {"rows": x.shape[0], "columns": x.shape[1], "scale": 0.5, "bias": 1.0}
    return lab.compile(source).row_score(x, w, lab.empty(x.shape[0]), args, grid=x.shape[0], threadgroup=32)


def empty_call(calls: int = 2000) -> float:
    """Seconds for one call of a kernel with one thread, results included."""
    kernel = lab.compile("kernel void nothing(device float* x [[buffer(0)]]) {}\n").nothing
    x = mx.zeros(1)
    mx.eval(x)
    kernel(x, grid=1)
    started = time.perf_counter()
    for _ in range(calls):
        kernel(x, grid=1)
    return (time.perf_counter() - started) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    new_cell()  # the first cell of a machine also makes the precompiled headers
    peer = statistics.median(_mlx_call() for _ in range(repeats))
    for name, measure, target in (
        ("a new 40-line kernel, cell to result", new_cell, 0.2),
        ("the same cell again", same_cell, 0.01),
        ("an empty call of one thread", empty_call, 60e-6),
    ):
        seconds = statistics.median(measure() for _ in range(repeats))
        share = f"{seconds / target:5.2f} of the {target * 1e3:g} ms aimed at"
        print(f"{name:40} {seconds * 1e3:9.3f} ms   {share}")
    print(f"{'for scale: y = x + 1 in MLX, evaluated':40} {peer * 1e3:9.3f} ms")


def _mlx_call(calls: int = 2000) -> float:
    x = mx.zeros(1)
    started = time.perf_counter()
    for _ in range(calls):
        mx.eval(x + 1)
    return (time.perf_counter() - started) / calls


if __name__ == "__main__":
    main()
