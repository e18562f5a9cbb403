"""Executors against the lane-exact model, and both against an oracle that follows masks of lanes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import lab
from lab import ir
from lab.engines import model
from lab.source import compiler
from tests.engines.divergence import Generator

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
KERNEL = """
kernel void run(device uint* x [[buffer(0)]], uint i [[thread_position_in_grid]]) {
    x[i] = program(x[i]);
}
"""
THREADS = 70  # two simdgroups and a partial one


def on_the_model(kernel: lab.Kernel, values: np.ndarray, size: int) -> np.ndarray:
    """Buffer 0 after one threadgroup of the kernel on the lane-exact model."""
    program = kernel.library.program
    unit = program.unit(kernel.signature, groups=False)
    flags = ("-Xclang", "-disable-llvm-passes", "-gline-tables-only")
    text, _ = compiler.compile_ir(unit, compiler.host(), program.options.math, *flags)
    memory = bytearray(values.tobytes())
    model.run(ir.parse(text), model.Launch({0: memory}, (size, 1, 1), (size, 1, 1)))
    return np.frombuffer(memory, values.dtype)


def by_masks(program: Generator, values: np.ndarray) -> np.ndarray:
    """What the program must compute, simdgroup by simdgroup."""
    parts = [program.run(values[s : s + 32].tolist()) for s in range(0, values.size, 32)]
    return np.concatenate(parts).astype(np.uint32)


def fibers_agree(seed: int, *, with_model: bool) -> None:
    print(f"seed {seed}")
    program = Generator(seed)
    kernel = lab.compile(HEAD + program.source + KERNEL).run
    values = np.random.default_rng(seed).integers(0, 1 << 32, THREADS, dtype=np.uint32)
    expected = by_masks(program, values)
    got = np.asarray(kernel(mx.array(values), grid=THREADS, threadgroup=THREADS))
    np.testing.assert_array_equal(got, expected)
    if with_model:
        np.testing.assert_array_equal(on_the_model(kernel, values, THREADS), expected)


# Seeds 5, 15, 54, 66 and 70 once told lanes of different iterations apart wrongly: loops that merge with what
# follows them, values that a phi carries in from elsewhere. 364 once mixed up narrow and wide values.
@pytest.mark.parametrize("seed", [3, 14, 15, 364, 880, 70])
def test_divergent_program_computes_the_same_on_fibers_model_and_masks(seed):
    fibers_agree(seed, with_model=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 54, 66, *range(1000, 1150)])
def test_more_divergent_programs_compute_the_same_on_fibers_and_masks(seed):
    fibers_agree(seed, with_model=seed % 5 == 0)


COLLECTIVES = {
    "sum": "simd_sum(v)",
    "product": "simd_product(v)",
    "min": "simd_min(v)",
    "max": "simd_max(v)",
    "inclusive": "simd_prefix_inclusive_sum(v)",
    "exclusive": "simd_prefix_exclusive_sum(v)",
    "inclusive product": "simd_prefix_inclusive_product(v)",
    "exclusive product": "simd_prefix_exclusive_product(v)",
    "broadcast": "simd_broadcast(v, ushort(3))",
    "first": "simd_broadcast_first(v)",
    "shuffle": "simd_shuffle(v, ushort((lane * 7 + 3) % 32))",
    "xor": "simd_shuffle_xor(v, ushort(5))",
    "up": "simd_shuffle_up(v, ushort(2))",
    "down": "simd_shuffle_down(v, ushort(2))",
    "rotate": "simd_shuffle_rotate_up(v, ushort(9))",
    "quad sum": "quad_sum(v)",
    "quad max": "quad_max(v)",
    "quad shuffle": "quad_shuffle(v, ushort(1))",
    "quad broadcast": "quad_broadcast(v, ushort(2))",
}
TYPES = {"float": np.float32, "half": np.float16, "int": np.int32, "uint": np.uint32, "short": np.int16,
         "ushort": np.uint16, "char": np.int8, "uchar": np.uint8}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_every_collective_gives_the_model_s_result_for(kind):
    """Small whole numbers, so that every order of adding gives the same float."""
    written = "".join(f"  out[{n} * 32 + lane] = {call};\n" for n, call in enumerate(COLLECTIVES.values()))
    kernel = lab.compile(
        HEAD
        + f"kernel void run(device {kind}* out [[buffer(0)]], ushort lane [[thread_index_in_simdgroup]]) {{\n"
        f"  {kind} v = {kind}(lane % 3 + 1 - (lane % 7 == 0));\n{written}}}\n"
    ).run
    zeros = np.zeros(32 * len(COLLECTIVES), TYPES[kind])
    got = np.asarray(kernel(mx.array(zeros), grid=32, threadgroup=32))
    expected = on_the_model(kernel, zeros, 32)
    for n, name in enumerate(COLLECTIVES):
        part = slice(32 * n, 32 * n + 32)
        np.testing.assert_array_equal(got[part], expected[part], err_msg=name)


def test_barrier_orders_threadgroup_memory_between_simdgroups():
    kernel = lab.compile(
        HEAD
        + """
kernel void run(device uint* x [[buffer(0)]], uint i [[thread_position_in_threadgroup]],
                uint n [[threads_per_threadgroup]]) {
    threadgroup uint shared[1024];
    for (uint round = 0; round < 3; round++) {
        shared[i] = x[i] + round;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        x[i] = shared[(i + 37) % n] * 3 + shared[n - 1 - i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}
"""
    ).run
    values = np.arange(1000, dtype=np.uint32)
    expected = values.copy()
    for step in range(3):
        shared = expected + np.uint32(step)
        expected = np.roll(shared, -37) * np.uint32(3) + shared[::-1]
    got = np.asarray(kernel(mx.array(values), grid=1000, threadgroup=1000))
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_array_equal(on_the_model(kernel, values, 1000), expected)


@pytest.mark.parametrize("barrier", ["simdgroup_barrier", "threadgroup_barrier"])
def test_barriers_among_many_loads_and_branches_keep_the_ir_s_numbering(barrier, rng):
    # A call that gives a value nobody names takes a number of its own, and all that follow would be off.
    kernel = lab.compile(
        HEAD + "kernel void f(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],"
        "constant uint& n [[buffer(2)]], uint i [[thread_position_in_grid]]) {\n"
        "    threadgroup float t[64]; float s = 0;\n"
        "    for (uint j = 0; j < n; j++) {\n"
        f"        t[i] = x[j] * x[i]; {barrier}(mem_flags::mem_threadgroup);\n"
        "        float a = t[i ^ 1]; if (a > x[j]) s += a * x[j + 1]; else s -= a;\n"
        f"        {barrier}(mem_flags::mem_threadgroup);\n"
        "    }\n    y[i] = s;\n}\n"
    ).f
    x = rng.standard_normal(64).astype(np.float32)
    expected = np.zeros(64)
    for j in range(20):
        a = (x[j] * x)[np.arange(64) ^ 1]
        expected += np.where(a > x[j], a.astype(float) * x[j + 1], -a.astype(float))
    got = kernel(x, lab.empty(64), 20, grid=64, threadgroup=64)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_a_function_with_any_attributes_that_meets_is_inlined():
    # Matrices made from one value are made by a constructor whose address nobody takes.
    kernel = lab.compile(
        HEAD + "kernel void f(device half* y [[buffer(0)]]) {\n"
        "    simdgroup_half8x8 a(2.0h), c = simdgroup_half8x8(1.0h);\n"
        "    simdgroup_multiply_accumulate(c, a, a, c); simdgroup_store(c, y, 8);\n}\n"
    ).f
    got = np.asarray(kernel(lab.empty(64, mx.float16), grid=32, threadgroup=32))
    np.testing.assert_array_equal(got.reshape(8, 8), 5 * np.eye(8))
