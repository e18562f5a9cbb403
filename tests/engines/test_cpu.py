"""The CPU engine: which threads run, on what memory, and what a kernel that goes wrong can do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import lab
from lab import cache
from lab.engines.cpu.memory import arena

# Each thread counts itself at its place and tells whether all its attributes agree.
VISITS = """
kernel void visits(device atomic_uint* count [[buffer(0)]], device uint* index [[buffer(1)]],
    device uint4* sizes [[buffer(2)]],
                   uint3 p [[thread_position_in_grid]], uint3 total [[threads_per_grid]],
                   uint3 group [[threadgroup_position_in_grid]], uint3 groups [[threadgroups_per_grid]],
                   uint3 within [[thread_position_in_threadgroup]], uint3 size [[threads_per_threadgroup]],
                   uint3 full [[dispatch_threads_per_threadgroup]], uint flat [[thread_index_in_threadgroup]])
{
    const uint at = (p.z * total.y + p.y) * total.x + p.x;
    atomic_fetch_add_explicit(&count[at], 1u, memory_order_relaxed);
    const bool placed = all(group * full + within == p)
        && flat == (within.z * size.y + within.y) * size.x + within.x;
    index[at] = placed && all(group < groups) && all(within < size) ? flat : 0xffffffffu;
    sizes[at] = uint4(size, groups.x * groups.y * groups.z);
}
"""

SHAPES = [
    (1, 1), (7, 3), (1000, 256), (1024, 1024), (1025, 1024), (5, 1024),
    ((10, 7), (4, 4)), ((1, 300), (1, 64)), ((33, 2), 32),
    ((5, 6, 7), (2, 3, 4)), ((2, 2, 65), (1, 1, 64)), ((31, 3, 5), (8, 8, 16)), ((3, 4, 5), None),
    (12345, None),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "threadgroup"), SHAPES, ids=str)
def test_every_thread_of_the_grid_runs_once_at_its_place(msl, grid, threadgroup):
    threads = int(np.prod(grid))
    out = msl(VISITS).visits(
        mx.zeros(threads, mx.uint32), lab.empty(threads, mx.uint32), lab.empty((threads, 4), mx.uint32),
        grid=grid, threadgroup=threadgroup,
    )  # fmt: skip
    assert (np.asarray(out.count) == 1).all()
    size = np.asarray(out.sizes)[:, :3].prod(1)
    assert (np.asarray(out.index) < size).all()  # 2^32 - 1 where a position or an index was wrong


@pytest.mark.parametrize(
    ("grid", "threadgroup"), [(10, 4), ((10, 7), (4, 4)), ((5, 6, 7), (2, 3, 4))], ids=str
)
def test_the_last_threadgroups_hold_what_is_left(msl, grid, threadgroup):
    threads = int(np.prod(grid))
    out = msl(VISITS).visits(
        mx.zeros(threads, mx.uint32), lab.empty(threads, mx.uint32), lab.empty((threads, 4), mx.uint32),
        grid=grid, threadgroup=threadgroup,
    )  # fmt: skip
    grid, group = (np.array((*np.atleast_1d(s), 1, 1)[:3]) for s in (grid, threadgroup))
    z, y, x = np.indices(tuple(grid[::-1])).reshape(3, -1)
    first = np.stack([x, y, z], -1) // group * group
    sizes = np.asarray(out.sizes)
    assert np.array_equal(sizes[:, :3], np.minimum(group, grid - first))
    assert (sizes[:, 3] == np.prod(-(-grid // group))).all()


def test_groups_count_whole_threadgroups(msl):
    out = msl(VISITS).visits(
        mx.zeros(64, mx.uint32),
        lab.empty(64, mx.uint32),
        lab.empty((64, 4), mx.uint32),
        groups=(4, 2),
        threadgroup=(2, 4),
    )
    assert (np.asarray(out.sizes) == (2, 4, 1, 8)).all()


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("scalar", ["uint", "ushort"])
def test_attributes_come_in_every_width(msl, scalar, width):
    kind = scalar + (str(width) if width > 1 else "")
    parts = [f"p.{c}" for c in "xyz"[:width]] if width > 1 else ["p"]
    source = f"""kernel void f(device {scalar}* out, {kind} p [[thread_position_in_grid]], {
        kind
    } n [[threads_per_grid]]) {{
        const uint at = {
        " + ".join(
            f"{'*'.join([part, *(f'n.{c}' if width > 1 else 'n' for c in 'xyz'[:i])])}"
            for i, part in enumerate(parts)
        )
    };
        out[at] = {" + ".join(f"{7**i} * {part}" for i, part in enumerate(parts))};
    }}"""
    grid = (6, 5, 4)[:width]
    out = msl(source).f(
        lab.empty(tuple(reversed(grid)), mx.uint32 if scalar == "uint" else mx.uint16),
        grid=grid,
        threadgroup=4,
    )
    wanted = sum(7**i * axis for i, axis in enumerate(reversed(np.indices(tuple(reversed(grid))))))
    assert np.array_equal(out, wanted)


def test_simdgroup_attributes_count_in_32s(msl):
    source = """kernel void f(device uint4* out, uint i [[thread_position_in_grid]],
        uint lane [[thread_index_in_simdgroup]],
        uint simdgroup [[simdgroup_index_in_threadgroup]], uint n [[simdgroups_per_threadgroup]],
            ushort w [[threads_per_simdgroup]])
        { out[i] = uint4(lane, simdgroup, n, w); }"""
    out = np.asarray(msl(source).f(lab.empty((150, 4), mx.uint32), grid=150, threadgroup=100))
    within = np.arange(150) % 100
    n = np.where(np.arange(150) < 100, 4, 2)
    assert np.array_equal(out, np.stack([within % 32, within // 32, n, np.full(150, 32)], -1))


# ---- memory ------------------------------------------------------------------------------------------------

DTYPES = {
    "bool": mx.bool_, "char": mx.int8, "uchar": mx.uint8, "short": mx.int16, "ushort": mx.uint16,
    "int": mx.int32, "uint": mx.uint32, "long": mx.int64, "ulong": mx.uint64,
    "half": mx.float16, "bfloat": mx.bfloat16, "float": mx.float32,
}  # fmt: skip


@pytest.mark.parametrize("scalar", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_every_dtype_is_read_and_written(msl, rng, scalar, n):
    kind = scalar + (str(n) if n > 1 else "")
    kernel = msl(
        f"kernel void f(device const {kind}* x, device {kind}* y, uint i [[thread_position_in_grid]]) {{ "
        f"y[i] = x[i]; }}"
    ).f
    dtype = DTYPES[scalar]
    x = mx.array(rng.integers(0, 2 if scalar == "bool" else 100, 12 * n)).astype(dtype)
    out = kernel(x, lab.empty((3, 4, n), dtype), grid=12)
    assert out.dtype == dtype
    assert mx.array_equal(out.reshape(-1), x)


def test_bits_of_floats_are_left_as_they_are(msl):
    bits = np.array([0x7FC00001, 0xFFC00123, 0x7F800000, 0x80000000, 1, 0x807FFFFF], np.uint32)
    source = (
        "kernel void f(device const float* x, device float* y, uint i [[thread_position_in_grid]]) { y[i] = "
        "x[i]; }"
    )
    out = msl(source).f(bits.view(np.float32), lab.empty(6), grid=6)
    assert np.array_equal(np.asarray(out).view(np.uint32), bits)


@pytest.mark.parametrize("offset", range(1, 4))
def test_vectors_are_read_from_any_element(msl, rng, offset):
    x = rng.standard_normal(70).astype(np.float32)
    kernel = msl(
        "kernel void f(device const float4* x, device float4* y, uint i [[thread_position_in_grid]]) { y[i] "
        "= 2 * x[i]; }"
    ).f
    out = kernel(mx.array(x)[offset : offset + 64], lab.empty(64), grid=16)
    assert np.array_equal(out, 2 * x[offset : offset + 64])


def test_an_array_of_hundreds_of_megabytes_is_taken(msl):
    n = 40_000_000
    kernel = msl("kernel void f(device uint* y, uint i [[thread_position_in_grid]]) { y[i] = i; }").f
    out = kernel(lab.empty(n, mx.uint32), grid=n)
    assert out[-1].item() == n - 1 and out[n // 2].item() == n // 2


def test_memory_of_results_is_given_back(msl):
    kernel = msl("kernel void f(device uint* y, uint i [[thread_position_in_grid]]) { y[i] = i; }").f
    kernel(lab.empty(1, mx.uint32), grid=1)

    def held() -> int:
        return sum(block.open_bytes for block in arena()._free)

    for _ in range(3):
        kernel(lab.empty(10_000_000, mx.uint32), grid=1)
    assert held() <= 33 << 20


# ---- atomics and threads -----------------------------------------------------------------------------------


@pytest.mark.parametrize("threadgroup", [1, 32, 1000])
def test_atomics_lose_no_update(msl, threadgroup):
    source = """kernel void f(device atomic_uint* sum, device atomic_int* least, device atomic_uint* bits,
        device atomic_uint* last,
                              uint i [[thread_position_in_grid]]) {
        for (uint j = 0; j < 10; ++j) atomic_fetch_add_explicit(&sum[(i + j) % 4], i + j,
            memory_order_relaxed);
        atomic_fetch_min_explicit(least, -int(i), memory_order_relaxed);
        atomic_fetch_or_explicit(bits, 1u << (i % 20), memory_order_relaxed);
        uint seen = atomic_load_explicit(last, memory_order_relaxed);
        while (!atomic_compare_exchange_weak_explicit(last, &seen, seen + 3, memory_order_relaxed,
            memory_order_relaxed)) { }
    }"""
    n = 20_000
    zero = mx.zeros(1, mx.uint32)
    out = msl(source).f(
        mx.zeros(4, mx.uint32), mx.array([5], mx.int32), zero, zero, grid=n, threadgroup=threadgroup
    )
    i, j = np.arange(n)[:, None], np.arange(10)
    sums = np.bincount(((i + j) % 4).ravel(), (i + j).ravel(), 4).astype(np.uint64) & np.uint64(0xFFFFFFFF)
    assert np.array_equal(out[0], sums)
    assert (out.least.item(), out.bits.item(), out.last.item()) == (1 - n, (1 << 20) - 1, 3 * n)


def test_float_atomics_add_up(msl):
    source = (
        "kernel void f(device atomic_float* sum) { atomic_fetch_add_explicit(sum, 0.5f, "
        "memory_order_relaxed); }"
    )
    assert msl(source).f(mx.zeros(1), grid=5000, threadgroup=8).item() == 2500


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2 if hasattr(os, "sched_getaffinity") else False, reason="one core"
)
def test_threadgroups_run_on_several_cores_at_once(msl, patience):
    # Two threadgroups, each waiting for the other: this ends only if both run at the same time.
    source = """kernel void f(device atomic_uint* here, uint g [[threadgroup_position_in_grid]]) {
        atomic_store_explicit(&here[g], 1u, memory_order_relaxed);
        while (atomic_load_explicit(&here[1 - g], memory_order_relaxed) == 0) { }
    }"""
    assert msl(source).f(mx.zeros(2, mx.uint32), groups=2, threadgroup=1).tolist() == [1, 1]


def test_threadgroups_start_in_increasing_order(msl, patience):
    # Each threadgroup waits for the one before it, as look-back scans do: in any other order this never ends.
    source = """kernel void f(device atomic_uint* done, device uint* at,
        uint g [[threadgroup_position_in_grid]]) {
        while (atomic_load_explicit(done, memory_order_relaxed) != g) { }
        at[g] = g;
        atomic_store_explicit(done, g + 1, memory_order_relaxed);
    }"""
    out = msl(source).f(mx.zeros(1, mx.uint32), lab.empty(2000, mx.uint32), groups=2000, threadgroup=1)
    assert np.array_equal(out.at, np.arange(2000))


WAITING = """
import threading, lab, numpy as np
flag = np.zeros(1, np.uint32)
kernel = lab.compile(
    "#include <metal_stdlib>\\n"
    "kernel void f(device metal::atomic_uint* x)"
    "{ while (metal::atomic_load_explicit(x, metal::memory_order_relaxed) == 0) { } }"
).f
kernel.describe()
threading.Timer(0.2, flag.fill, [1]).start()
kernel.run_(flag, grid=1)
"""


def test_the_interpreter_runs_on_while_a_kernel_does():
    # The kernel ends only when another Python thread has written into its memory.
    done = subprocess.run(
        [sys.executable, "-c", WAITING], stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- kernels that go wrong ---------------------------------------------------------------------------------

STRAY = """
kernel void write(device float* x, constant long& at) { x[at] = 1; }
kernel void read(device const float* y, device float* x, constant long& at) { x[0] = y[at]; }
kernel void null(device float* x, constant ulong& zero) { *(device float*)zero = x[0]; }
kernel void fill(device uint* x, uint i [[thread_position_in_grid]]) { x[i] = i; }
"""


def fault(call, *args, **named) -> str:
    with pytest.raises(lab.KernelFault) as caught:
        call(*args, **named)
    return str(caught.value)


@pytest.mark.parametrize("n", [1, 3, 4, 1000, 1024, 4096])
@pytest.mark.parametrize("side", ["after its end", "before its start"])
def test_a_write_just_outside_is_told(msl, n, side):
    at = n if side == "after its end" else -1
    text = fault(msl(STRAY).write, mx.zeros(n), at, grid=1)
    assert text.startswith("Kernel 'write' ")
    assert re.search(rf"nearest to buffer\(0\) 'x': .*{side} \(element {at}; it has {n}\)", text)


@pytest.mark.parametrize("at", [1 << 20, 1 << 30, (1 << 31) - 1, (1 << 32) - 1, -(1 << 20), -(1 << 31)])
def test_a_write_far_outside_is_told(msl, at):
    text = fault(msl(STRAY).write, mx.zeros(4), at, grid=1)
    distance, side = (4 * at - 16, "after its end") if at > 0 else (-4 * at, "before its start")
    assert (
        f"Kernel 'write' touched memory that is not its own, nearest to buffer(0) 'x': {distance} bytes "
        f"{side}" in text
    )
    assert text.endswith("threadgroup 0.")


def test_a_null_pointer_is_told(msl):
    assert "through a null pointer" in fault(msl(STRAY).null, mx.zeros(4), 0, grid=1)


def test_the_threadgroup_that_faulted_is_named(msl):
    kernel = msl("kernel void f(device float* x, uint3 g [[threadgroup_position_in_grid]]) {"
                 " if (g.x == 2 && g.y == 1) x[1 << 28] = 1; }").f  # fmt: skip
    assert "threadgroup (2, 1)" in fault(kernel, mx.zeros(4), groups=(3, 2), threadgroup=1)


@pytest.mark.parametrize("at", [4, -1, 1 << 28, -(1 << 28)])
def test_a_fault_leaves_every_array_as_it_was(msl, at):
    given = mx.arange(4).astype(mx.float32)
    others = [mx.full(4, float(i)) for i in range(20)]
    mx.eval(given, *others)
    fault(msl(STRAY).write, given, at, grid=1)
    assert given.tolist() == [0, 1, 2, 3]
    assert [o.tolist() for o in others] == [[float(i)] * 4 for i in range(20)]


def test_a_hundred_faults_leave_the_process_healthy(msl):
    library = msl(STRAY)
    for i in range(100):
        fault(library.write, mx.zeros(4), 1 << (20 + i % 12), grid=1)
        if i % 10 == 0:
            assert np.array_equal(library.fill(lab.empty(3000, mx.uint32), grid=3000), np.arange(3000))


def test_faults_on_all_cores_at_once_are_one_error(msl):
    kernel = msl(
        "kernel void f(device float* x, uint i [[thread_position_in_grid]]) { x[(1 << 28) + i] = 1; }"
    ).f
    assert "touched memory that is not its own" in fault(kernel, mx.zeros(4), grid=4096, threadgroup=16)


def test_endless_recursion_is_told(msl):
    source = """uint deep(device uint* y, uint x) {
            uint here[64];
            here[x % 64] = y[0];
            const uint r = deep(y, x + y[0]);
            return r + here[(x + r) % 64];
        }
        kernel void f(device uint* x) { x[0] = deep(x, 0); }"""
    text = fault(msl(source).f, mx.ones(4, mx.uint32), grid=1)
    assert text.startswith("Kernel 'f' ran out of stack in ")


def test_integer_division_by_zero_is_no_fault(msl):
    source = "kernel void f(device int* x) { x[0] = x[1] / x[2]; x[3] = x[1] % x[2]; x[4] = x[1] / 2; }"
    out = msl(source).f(mx.array([0, 7, 0, 0, 0], mx.int32), grid=1)
    assert out[4].item() == 3


def test_a_kernel_that_only_reads_too_far_is_stopped(msl):
    text = fault(msl(STRAY).read, mx.zeros(4), mx.zeros(4), 1 << 40, grid=1)
    assert text.startswith("Kernel 'read' touched memory that is not its own")


FAULTHANDLER = """
import faulthandler, sys
faulthandler.enable()
import lab, mlx.core as mx
library = lab.compile("kernel void f(device float* x, constant long& at) { x[at] = 1; }")
for i in range(20):
    try:
        library.f(mx.zeros(4), 1 << 30, grid=1)
    except lab.KernelFault:
        continue
    sys.exit("no fault")
assert library.f(mx.zeros(4), 1, grid=1).tolist() == [0, 1, 0, 0]
import ctypes
print("healthy", flush=True)
ctypes.string_at(0)  # Python's own fault still ends in faulthandler
"""


def test_faulthandler_and_the_engine_live_together():
    done = subprocess.run([sys.executable, "-c", FAULTHANDLER], capture_output=True, text=True, check=False)
    assert done.stdout == "healthy\n"
    assert done.returncode < 0
    assert "Fatal Python error: Segmentation fault" in done.stderr


FRAGMENTED = """
import ctypes, lab, mmap
from lab.engines.cpu import CpuEngine
from lab.engines.cpu.native import runtime
source = "constant int t[5] = {3, 1, 4, 1, 5}; kernel void f(device int* x) { x[0] = t[x[0]]; }"
program = lab.compile(source).program
step = 3 << 30
base = runtime().reserve(300 * step)
for i in range(300):
    ctypes.CDLL(None).munmap(ctypes.c_void_p(base + i * step), ctypes.c_size_t(mmap.PAGESIZE))
kept = [CpuEngine().compile(program, program.kernels["f"]) for _ in range(500)]
print(lab.compile(source, name="again").f([2], grid=1).item())
"""


def test_code_is_loaded_where_free_addresses_lie_far_apart():
    # The ranges around written buffers cut the address space up: parts of a kernel must still lie together.
    done = subprocess.run([sys.executable, "-c", FRAGMENTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "4\n", "")


# ---- compiled code kept between processes ------------------------------------------------------------------

PROCESS = """
import sys, lab, mlx.core as mx
library = lab.compile(sys.argv[1])
out = [library[f"k{i}"](mx.zeros(3, mx.int32), grid=3).tolist() for i in range(4)]
assert out == [[i] * 3 for i in range(4)], out
print(*[library[f"k{i}"].description.from_cache for i in range(4)])
"""

KERNELS = "".join(
    f"kernel void k{i}(device int* x, uint t [[thread_position_in_grid]]) {{ x[t] = {i}; }}\n"
    for i in range(4)
)


def start(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, KERNELS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "METAL_LAB_CACHE": str(folder)},
    )  # fmt: skip


def test_processes_that_begin_with_an_empty_cache_share_it(tmp_path):
    ended = [process.communicate() for process in [start(tmp_path) for _ in range(2)]]
    assert all("False" in out or "True" in out for out, _ in ended), ended
    out, errors = start(tmp_path).communicate()
    assert (out.split(), errors) == (["True"] * 4, "")


def test_compiled_code_is_found_again(msl):
    source = "kernel void again(device int* x) { x[0] = 42; }"
    first = msl(source, name="first").again.describe()
    second = msl(source, name="second").again.describe()
    assert (first.from_cache, second.from_cache) == (False, True)


@pytest.mark.parametrize("change", [{"math": "fast"}, {"defines": {"N": 43}}])
def test_other_options_are_other_code(msl, change):
    source = "kernel void options(device float* x) { x[0] = N * x[1] + x[2]; }"
    options = {"defines": {"N": 42}, "math": "safe"}
    msl(source, **options).options.describe()
    assert msl(source, name="same", **options).options.describe().from_cache
    assert not msl(source, **(options | change)).options.describe().from_cache


def test_a_damaged_entry_is_no_disaster(msl):
    kernel = msl("kernel void damaged(device int* x) { x[0] = 7; }", name="one").damaged
    before = set(cache.folder().iterdir())
    kernel.describe()
    (entry,) = set(cache.folder().iterdir()) - before
    entry.write_bytes(b"")
    again = msl("kernel void damaged(device int* x) { x[0] = 7; }", name="two").damaged
    assert again([0], grid=1).item() == 7
