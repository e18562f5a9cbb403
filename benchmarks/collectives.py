"""What it costs threads to meet: collectives in a bare loop, and two kernels that live on them beside NumPy.

Times are the shortest of several. A loop runs one threadgroup, so one core. The two kernels run on all
cores, and their time is that of the call with its new arrays, as NumPy's is.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import mlx.core as mx
import numpy as np

import lab
from lab import resources

THREADS = (32, 256, 1024)
TARGET = 10.0  # ns per lane

# Every step keeps its value within a few powers of two of 1: denormals would cost more than what is measured.
STEPS = {
    "simd_sum": "x = simd_sum(x) * 0.03125f",
    "simd_shuffle": "x = simd_shuffle(x, (lane + 1) & 31)",
    "simd_prefix_exclusive_sum": "x = simd_prefix_exclusive_sum(x) * 0.03125f + 1.0f",
    "threadgroup_barrier": "threadgroup_barrier(mem_flags::mem_threadgroup)",
}

SOURCE = """#include <metal_stdlib>
using namespace metal;

kernel void bare_loop(device float* values [[buffer(0)]],
                      constant uint& iterations [[buffer(1)]],
                      uint i [[thread_index_in_threadgroup]],
                      ushort lane [[thread_index_in_simdgroup]])
{
    float x = values[i];
    for (uint n = 0; n < iterations; n++) {
        STEP;
    }
    values[i] = x;
}
"""


def per_lane(step: str, threads: int, rounds: int) -> float:
    """Nanoseconds that one step of the loop takes, divided by the threads of the group."""
    kernel = lab.compile(SOURCE, defines={"STEP": step}).bare_loop
    values = mx.ones(threads)
    iterations = 2_000_000 // threads
    best = float("inf")
    for _ in range(rounds):
        kernel(values, iterations, grid=threads, threadgroup=threads)
        assert kernel.stats is not None
        best = min(best, kernel.stats.run_seconds / (iterations * threads))
    return best * 1e9


def row_softmax(rows: int, columns: int, rounds: int) -> tuple[float, float]:
    """Seconds for the softmax of each row: the kernel's, NumPy's."""
    x = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    kernel, array = example("softmax.metal")["softmax"], mx.array(x)
    args = {"rows": rows, "columns": columns}
    groups = -(-rows // 8)

    def numpy() -> np.ndarray:
        e = np.exp(x - x.max(axis=1, keepdims=True))
        e /= e.sum(axis=1, keepdims=True)
        return e

    ours = shortest(lambda: kernel(array, lab.empty(x.shape), args, groups=groups, threadgroup=256), rounds)
    return ours, shortest(numpy, rounds)


def reduction(count: int, rounds: int) -> tuple[float, float]:
    """Seconds for the sum of an array, in threadgroups of 1024 and then one: the kernel's, NumPy's."""
    x = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    kernel, array = example("reduction.metal")["reduce_sum"], mx.array(x)

    def two_levels() -> mx.array:
        partials = kernel(array, lab.empty(64), count, groups=64, threadgroup=1024)
        return kernel(partials, lab.empty(1), 64, groups=1, threadgroup=1024)

    return shortest(two_levels, rounds), shortest(x.sum, rounds)


def example(file: str) -> lab.Library:
    """The compiled kernels of one of the lab's example files."""
    return lab.compile(resources.kernels() / "examples" / file)


def shortest(run: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of ``rounds`` runs, after one that does not count."""
    run()
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds

    print(f"{'ns per lane, threads:':28}" + "".join(f"{threads:8}" for threads in THREADS))
    for name, step in STEPS.items():
        times = [per_lane(step, threads, rounds) for threads in THREADS]
        share = f"   at worst {max(times) / TARGET:.2f} of the {TARGET:g} ns aimed at"
        print(f"{name:28}" + "".join(f"{ns:8.2f}" for ns in times) + share)
    print()
    for name, (ours, numpy) in (
        ("softmax of 1000 rows of 1000", row_softmax(1000, 1000, rounds)),
        ("softmax of 32 rows of 32000", row_softmax(32, 32000, rounds)),
        ("sum of 4 million", reduction(1 << 22, rounds)),
    ):
        print(f"{name:28} {ours * 1e3:8.2f} ms, NumPy {numpy * 1e3:8.2f} ms: {ours / numpy:5.2f} of NumPy's")


if __name__ == "__main__":
    main()
