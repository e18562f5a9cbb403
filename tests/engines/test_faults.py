"""What can go wrong while a kernel runs: each event is told in a sentence, and only the launch is lost."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import lab

CHECKOUT = Path(__file__).resolve().parents[2]

# Where MEETING is defined, the threads of every kernel meet: the plain loop over threads cannot run it then.
SOURCE = """
#ifdef MEETING
#define MEET threadgroup_barrier(mem_flags::mem_device)
#else
#define MEET
#endif
#define I uint i [[thread_position_in_grid]]

kernel void doubled(const device float* x, device float* y, I) { MEET; y[i] = 2 * x[i]; }

kernel void shifted(const device float* x, device float* y, constant long& by, constant uint& who, I) {
    y[i] = x[i];
    MEET;
    if (i == who) y[(long)i + by] = -1;
}
kernel void shifted4(device float4* y, constant long& by, I) { MEET; y[(long)i + by] = i; }
kernel void sum_outside(const device float* x, device float* y, constant long& by, I) {
    MEET;
    y[i] = x[i] + y[(long)i + by];
}
kernel void null_write(const device float* x, device float* y, I) {
    device float* nowhere = nullptr;
    MEET;
    y[i] = x[i];
    if (i == 3) nowhere[i] = 1;
}
kernel void null_read(const device float* x, device float* y, I) {
    const device float* nowhere = nullptr;
    MEET;
    y[i] = x[i] + nowhere[i & 7];
}
kernel void made_up(device float* y, constant ulong& address, I) {
    MEET;
    y[i] = 1;
    if (i == 3) *(device float*)address = 1;
}
kernel void endless(const device float* x, device float* y, I) {
    MEET;
    for (;;) y[i] += x[i];
}
kernel void endless_and_empty(device float* y, I) {
    MEET;
    y[i] = 1;
    while (true) {}
}
static float deeper(float x, const device float* y) { return x > 1e30f ? x : deeper(x + y[0], y) * 0.5f + 1; }
kernel void recursive(const device float* x, device float* y, constant uint& who, I) {
    y[i] = x[i];
    MEET;
    if (i == who) y[i] = deeper(0, x);
    MEET;
}
template <uint N> static float large(float x) {
    float a[N];
    for (uint j = 0; j < N; ++j) a[j] = x + j;
    MEET;
    float sum = 0;
    for (uint j = 0; j < 16; ++j) sum += a[((uint)sum + j * 977) % N];
    return sum;
}
kernel void private_8k(const device float* x, device float* y, I) { y[i] = large<2000>(x[i]); }
kernel void private_8m(const device float* x, device float* y, I) { y[i] = large<2000000>(x[i]); }
kernel void private_stray(device float* y, constant int& at, I) {
    float a[4] = {0, 1, 2, 3};
    MEET;
    a[at] = 777;
    y[i] = a[i & 3];
}
"""

BARRIERS = """
#define BARRIER threadgroup_barrier(mem_flags::mem_threadgroup)
kernel void branches(device float* y, uint i [[thread_position_in_threadgroup]]) {
    y[i] = i;
    if (i < 20) {
        BARRIER;
    } else {
        BARRIER;
    }
}
kernel void one_branch(device float* y, uint i [[thread_position_in_threadgroup]]) {
    y[i] = i;
    if (i < 20) BARRIER;
    BARRIER;
}
kernel void iterations(device float* y, uint i [[thread_position_in_threadgroup]]) {
    for (uint k = 0; k < 4; ++k) {
        if (i == 33 && k == 1) continue;
        y[i] = k;
        BARRIER;
    }
}
static void helper(uint i) {
    if (i & 1) BARRIER;
}
kernel void in_a_helper(device float* y, uint i [[thread_position_in_threadgroup]]) {
    y[i] = i;
    helper(i);
    BARRIER;
}
kernel void some_return(device float* y, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[64];
    if (i >= 40) {
        y[i] = -1;
        return;
    }
    s[i] = i;
    BARRIER;
    y[i] = s[39 - i];
}
"""

THREADGROUP = """
kernel void declared(device float* y, constant int& at, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[48];
    s[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i == 5) s[at] = 1;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = s[i];
}
kernel void given(device float* y, constant int& at, threadgroup float* s [[threadgroup(0)]],
                  uint i [[thread_position_in_threadgroup]]) {
    s[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (i == 5) s[at] = 1;
    y[i] = s[i];
}
kernel void both(device float* y, threadgroup float* s [[threadgroup(0)]],
                 uint i [[thread_position_in_threadgroup]]) {
    threadgroup float own[5120];
    own[i] = s[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = own[i] + s[i];
}
"""
OVERSIZE = """
kernel void oversize(device float* y, uint i [[thread_position_in_threadgroup]]) {
    threadgroup float s[10240];
    s[i] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = s[i];
}
"""

FAR = 2**32 - 1  # elements: what an index is off by that wrapped around in 32 bits


class Bystanders:
    """Arrays of all sorts that no kernel may touch, and what is in them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.x = mx.array(rng.standard_normal(64, dtype=np.float32))
        self.numpy = rng.standard_normal(64, dtype=np.float32)
        sizes = (1, 64, 1024, 5000, 100_000, 3_000_000)
        self.arrays: list[mx.array | np.ndarray] = [self.x, self.numpy]
        self.arrays += [rng.standard_normal(n, dtype=np.float32) for n in sizes]
        self.arrays += [mx.array(rng.integers(0, 255, n, dtype=np.uint8)) for n in sizes]
        self.arrays.append(mx.array(rng.standard_normal((33, 65), dtype=np.float32)).astype(mx.float16))
        mx.eval([a for a in self.arrays if isinstance(a, mx.array)])
        self.kept = [bytes(memoryview(a).cast("B")) for a in self.arrays]

    def unchanged(self) -> bool:
        return all(bytes(memoryview(a).cast("B")) == b for a, b in zip(self.arrays, self.kept, strict=True))


@pytest.fixture
def bystanders(rng: np.random.Generator) -> Bystanders:
    return Bystanders(rng)


@pytest.fixture
def fault(bystanders: Bystanders) -> Callable:
    """``with fault(pattern):`` expects an error whose message has the pattern, and everything as it was."""

    @contextmanager
    def expected(match: str, kind: type[lab.LabError] = lab.KernelFault) -> Iterator[None]:
        with pytest.raises(kind, match=match) as caught:
            yield
        assert bystanders.unchanged()
        shown = caught.value._render_traceback_()
        assert "Traceback" not in "\n".join(shown)

    return expected


@pytest.fixture(params=["loop", "meeting"])
def kernels(request: pytest.FixtureRequest, msl: Callable[..., lab.Library]) -> lab.Library:
    """The kernels of SOURCE, whose threads never meet, and again, so that they do."""
    return msl(SOURCE, defines={"MEETING": 1} if request.param == "meeting" else {})


def runs(library: lab.Library, x: mx.array | np.ndarray) -> bool:
    """Whether a kernel still gives the right result."""
    result = library.doubled(x, lab.empty(x.size), grid=x.size)
    return np.array_equal(np.asarray(result), 2 * np.asarray(x))


# ---- bad addresses ---------------------------------------------------------------------------------------


def test_kernels_that_do_nothing_wrong_run_on_both_executors(kernels, bystanders):
    assert runs(kernels, bystanders.x)
    assert runs(kernels, bystanders.numpy)


@pytest.mark.parametrize("by", [FAR, 2**31 - 1, -(2**31), 100_000, -100_000, 2000, -2000])
def test_a_write_far_outside_is_told_with_the_buffer_and_the_distance(kernels, fault, bystanders, by):
    where, element = ("after its end", 10 + by) if by > 0 else ("before its start", 10 + by)
    with fault(rf"'shifted' .*buffer\(1\) 'y': \d+ bytes {where} \(element {element}; it has 64\)"):
        kernels.shifted(bystanders.x, lab.empty(64), by, 10, grid=64)
    assert runs(kernels, bystanders.x)


@pytest.mark.parametrize("by", [FAR, -(2**31)])
def test_an_index_into_vectors_that_is_wrong_by_32_bits_hits_nothing(kernels, fault, by):
    with fault(rf"'shifted4' .*buffer\(0\) 'y'.*\(element {by}; it has 1\)"):
        kernels.shifted4(lab.empty((1, 4)), by, grid=1)


@pytest.mark.parametrize("n", [1, 5, 1024, 1500, 4096])
def test_a_write_one_element_behind_is_told(kernels, fault, n):
    with fault(rf"'shifted' .*buffer\(1\) 'y': just after its end \(element {n}; it has {n}\)"):
        kernels.shifted(np.ones(n, np.float32), lab.empty(n), 1, n - 1, grid=n)


@pytest.mark.parametrize("n", [1, 5, 1024, 1500, 4096])
def test_a_write_one_element_before_is_told(kernels, fault, n):
    with fault(rf"'shifted' .*buffer\(1\) 'y': \d bytes? before its start \(element -1; it has {n}\)"):
        kernels.shifted(np.ones(n, np.float32), lab.empty(n), -1, 0, grid=n)


@pytest.mark.parametrize("by", [FAR, -(2**31), 5000, -5000])
def test_a_read_far_outside_is_told(kernels, fault, bystanders, by):
    with fault(rf"'sum_outside' touched .*buffer\(1\) 'y': \d+ bytes .*\(element {by}; it has 1\)"):
        kernels.sum_outside(bystanders.x, lab.empty(1), by, grid=1)


def test_an_argument_that_a_faulty_kernel_was_to_change_is_as_it_was(kernels, fault, bystanders):
    for y in (mx.array(np.ones(64, np.float32)), np.ones(64, np.float32)):
        with fault("'shifted'"):
            kernels.shifted(bystanders.x, y, FAR, 63, grid=64)
        assert np.array_equal(np.asarray(y), np.ones(64))


@pytest.mark.parametrize("name", ["null_write", "null_read"])
def test_a_null_pointer_is_told(kernels, fault, bystanders, name):
    with fault(f"'{name}' touched memory that is not its own, through a null pointer"):
        kernels[name](bystanders.x, lab.empty(64), grid=64)


@pytest.mark.parametrize("address", [0x10_0000_0000, 0x5555_5555_5555_5550])
def test_an_address_far_from_everything_is_not_taken_for_a_null_pointer(kernels, fault, address):
    with fault(
        "'made_up' touched memory that is not its own, at (an )?address .*, far from all of its buffers"
    ):
        kernels.made_up(lab.empty(64), address, grid=64)


def test_a_fault_names_the_thread_where_threads_meet(msl, fault, bystanders):
    kernels = msl(SOURCE, defines={"MEETING": 1})
    with fault(r"in thread 10 of threadgroup 1\."):
        kernels.shifted(bystanders.x, lab.empty(64), FAR, 42, grid=64, threadgroup=32)


def test_a_fault_names_the_threadgroup_in_its_dimensions(kernels, fault):
    source = """
    kernel void corner(device float* y, uint3 g [[threadgroup_position_in_grid]]) {
        if (all(g == uint3(1, 2, 0))) y[1000000] = 1;
        y[g.x] = 1;
    }"""
    kernel = lab.compile(f"#include <metal_stdlib>\nusing namespace metal;{source}").corner
    with fault(r"in threadgroup \(1, 2\)\."):
        kernel(lab.empty(8), groups=(3, 3), threadgroup=1)


def test_a_fault_of_one_threadgroup_ends_others_that_wait_for_it(kernels, fault):
    source = """
    kernel void waits(device atomic_uint* flags, device float* y, uint g [[threadgroup_position_in_grid]]) {
        if (g == 0) {
            while (atomic_load_explicit(flags, memory_order_relaxed) == 0) {}
            atomic_store_explicit(flags + 1, 1 + (uint)y[1000000000], memory_order_relaxed);
        } else {
            atomic_store_explicit(flags, 1, memory_order_relaxed);
            while (atomic_load_explicit(flags + 1, memory_order_relaxed) == 0) {}
        }
    }"""
    kernel = lab.compile(f"#include <metal_stdlib>\nusing namespace metal;{source}").waits
    if len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)) < 2:
        pytest.skip("needs two cores: with one, threadgroups run one after the other")
    with fault("'waits' touched"):
        kernel(np.zeros(2, np.uint32), lab.empty(8), groups=2, threadgroup=1)


# ---- loops, recursion, private memory --------------------------------------------------------------------


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """KeyboardInterrupt on the main thread after ``seconds``."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_an_endless_loop_is_interrupted(kernels, bystanders):
    y = mx.array(np.ones(64, np.float32))
    kernels.endless.describe()
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.2):
        kernels.endless(bystanders.x, y, grid=64)
    assert bystanders.unchanged()
    assert np.array_equal(np.asarray(y), np.ones(64))
    assert runs(kernels, bystanders.x)


def test_an_endless_loop_with_nothing_in_it_is_interrupted(kernels, bystanders):
    kernels.endless_and_empty.describe()
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.2):
        kernels.endless_and_empty(lab.empty(4096), grid=4096)
    assert bystanders.unchanged()
    assert runs(kernels, bystanders.x)


@pytest.mark.parametrize("meeting", ["threadgroup_barrier(mem_flags::mem_none)", "y[i] = simd_sum(y[i])"])
def test_threads_that_meet_without_end_are_interrupted(msl, bystanders, meeting):
    kernel = msl(
        f"kernel void k(device float* y, uint i [[thread_position_in_grid]]) {{ for (;;) {meeting}; }}"
    ).k
    kernel.describe()
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.2):
        kernel(np.zeros(256, np.float32), grid=256)
    assert bystanders.unchanged()


def interrupted_thrice(call: Callable[[], object]) -> None:
    """Interrupt ``call`` after a while, and twice more while it still ends."""
    left = 3

    def handler(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    def wait() -> None:
        while left:
            time.sleep(0.001)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.01, 0.0002)
                call()
            except KeyboardInterrupt:
                wait()
        except KeyboardInterrupt:
            wait()
    except KeyboardInterrupt:
        wait()
    signal.signal(signal.SIGALRM, before)


def test_impatient_interruptions_leave_the_engine_in_order(kernels, bystanders):
    kernels.endless.describe()
    handlers = signal_actions()
    for _ in range(20):
        interrupted_thrice(lambda: kernels.endless(bystanders.x, lab.empty(64), grid=64))
    assert signal_actions() == handlers
    assert bystanders.unchanged()
    assert runs(kernels, bystanders.x)


def test_endless_recursion_is_told(kernels, fault, bystanders):
    with fault("'recursive' ran out of stack in .*threadgroup 0: a function calls itself without end"):
        kernels.recursive(bystanders.x, lab.empty(64), 37, grid=64)
    assert runs(kernels, bystanders.x)


def test_recursion_through_a_barrier_is_refused(msl, fault, bystanders):
    source = """
    static float deeper(float x, device float* y) {
        threadgroup_barrier(mem_flags::mem_device);
        return x > 1e30f ? x : deeper(x + y[0], y) * 0.5f + 1;
    }
    kernel void k(device float* y, uint i [[thread_position_in_grid]]) { y[i] = deeper(i, y); }"""
    with fault("calls itself", lab.LabError):
        msl(source).k(np.zeros(64, np.float32), grid=64)


def test_private_arrays_of_eight_kilobytes_fit(kernels, bystanders):
    got = kernels.private_8k(bystanders.x, lab.empty(64), grid=64)
    wanted = np.zeros(64, np.float32)
    x, lanes = np.asarray(bystanders.x), np.arange(64)
    a = x[:, None] + np.arange(2000, dtype=np.float32)
    for j in range(16):
        at = wanted.astype(np.int64).astype(np.uint32).astype(np.int64)  # a conversion below 0 is undefined
        wanted = wanted + a[lanes, (at + j * 977) % 2000]
    sure = x >= 0
    assert np.array_equal(np.asarray(got)[sure], wanted[sure])


def test_private_arrays_larger_than_a_stack_are_told(kernels, fault, bystanders):
    with fault("'private_8m' ran out of stack in .*or its private arrays are too large"):
        kernels.private_8m(bystanders.x, lab.empty(64), grid=64)


def test_a_stray_index_into_a_private_array_changes_no_other_array(kernels, bystanders):
    near = [np.zeros(4 << 20, np.float32) for _ in range(4)]  # where the system puts what is mapped next
    kernels.private_stray(lab.empty(1), 0, grid=1)
    near += [np.zeros(4 << 20, np.float32) for _ in range(4)]
    for at in range(-32 << 20, 32 << 20, 1 << 20):
        with suppress(lab.KernelFault):  # a place among the stacks of other threads may be changed
            kernels.private_stray(lab.empty(1), at or 1, grid=1)
    assert bystanders.unchanged()
    assert not any(a.any() for a in near)


def test_a_trap_is_not_taken_for_a_bad_address(msl, fault):
    kernel = msl(
        "kernel void k(device float* y, uint i [[thread_position_in_grid]]) { y[i] = 1; __builtin_trap(); }"
    ).k
    with fault("'k' stopped"):
        kernel(lab.empty(4), grid=4)


# ---- barriers --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def barriers(msl: Callable[..., lab.Library]) -> lab.Library:
    return msl(BARRIERS)


def line_of(source: str, kernel: str, nth: int, word: str = "BARRIER;") -> int:
    """Line of the ``nth`` ``word`` from ``kernel`` on, where two lines stand before ``source``."""
    lines = source.split("\n")
    at = next(i for i, line in enumerate(lines) if f" {kernel}(" in line)
    found = [i for i in range(at, len(lines)) if word in lines[i] and "#define" not in lines[i]]
    return found[nth] + 3


def test_barriers_in_both_branches_of_an_if_are_told_with_lines_and_threads(barriers, fault):
    one, other = (line_of(BARRIERS, "branches", n) for n in (0, 1))
    with fault(
        rf"'branches' has a barrier that not all threads of threadgroup 0 reach: thread 0 waits at "
        rf"threadgroup_barrier in cell line {one}, thread 20 at threadgroup_barrier in cell line {other}\."
    ):
        barriers.branches(lab.empty(64), grid=64, threadgroup=64)


def test_a_barrier_in_one_branch_is_told_with_lines_and_threads(barriers, fault):
    one, other = (line_of(BARRIERS, "one_branch", n) for n in (0, 1))
    with fault(rf"thread 0 waits at \w+ in cell line {one}, thread 20 at \w+ in cell line {other}\."):
        barriers.one_branch(lab.empty(64), grid=64, threadgroup=64)


def test_a_barrier_met_in_different_iterations_is_told(barriers, fault):
    line = line_of(BARRIERS, "iterations", 0)
    with fault(rf"threads 0 and 33 wait at \w+ in cell line {line} in different iterations of a loop"):
        barriers.iterations(lab.empty(64), grid=64, threadgroup=64)


def test_a_barrier_in_a_helper_is_told_by_the_helper_s_line(barriers, fault):
    inside, outside = line_of(BARRIERS, "helper", 0), line_of(BARRIERS, "in_a_helper", 0)
    with fault(rf"thread 0 waits at \w+ in cell line {outside}, thread 1 at \w+ in cell line {inside}\."):
        barriers.in_a_helper(lab.empty(64), grid=64, threadgroup=64)


def test_the_threadgroup_of_an_unmet_barrier_is_told(msl, fault):
    kernel = msl(
        "kernel void k(device float* y, uint g [[threadgroup_position_in_grid]],\n"
        "              uint i [[thread_position_in_threadgroup]]) {\n"
        "    if (g == 3 && i == 1) threadgroup_barrier(mem_flags::mem_none);\n"
        "    threadgroup_barrier(mem_flags::mem_none);\n"
        "    y[g] = 1;\n}"
    ).k
    with fault("not all threads of threadgroup 3 reach"):
        kernel(lab.empty(8), groups=8, threadgroup=64)


def test_a_barrier_that_returned_threads_do_not_reach_is_met_by_the_others(barriers):
    y = np.asarray(barriers.some_return(lab.empty(64), grid=64, threadgroup=64))
    assert np.array_equal(y, [*range(39, -1, -1), *[-1] * 24])


# ---- sizes -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(msl: Callable[..., lab.Library]) -> lab.Library:
    return msl(THREADGROUP)


def test_a_threadgroup_of_2048_is_refused_before_anything_runs(kernels, fault, bystanders):
    with fault("'doubled'.*2048.*1024", lab.ArgumentError):
        kernels.doubled(bystanders.x, lab.empty(64), grid=4096, threadgroup=2048)
    with fault("'doubled'.*2048.*1024", lab.ArgumentError):
        kernels.doubled(bystanders.x, lab.empty(64), grid=(64, 64), threadgroup=(64, 32))


def test_forty_kilobytes_of_declared_threadgroup_memory_are_refused(msl, fault):
    with fault(
        "'oversize' declares 40960 bytes of threadgroup memory; a threadgroup has at most 32768", lab.LabError
    ):
        msl(OVERSIZE).oversize(lab.empty(64), grid=64)


def test_forty_kilobytes_of_given_threadgroup_memory_are_refused(shared, fault):
    with fault(r"'given': threadgroup\(0\) 's' takes 1 to 32768 bytes, not 40960", lab.ArgumentError):
        shared.given(lab.empty(48), 0, grid=48, threadgroup_memory={0: 40960})


def test_forty_kilobytes_of_declared_and_given_threadgroup_memory_are_refused(shared, fault):
    with fault(
        r"'both' would use 40960 bytes .*20480 of its own, 20480 given.*at most 32768", lab.ArgumentError
    ):
        shared.both(lab.empty(64), grid=64, threadgroup_memory={0: 20480})


def test_all_thirty_two_kilobytes_of_threadgroup_memory_can_be_used(shared):
    y = shared.both(lab.empty(64), grid=64, threadgroup=64, threadgroup_memory={0: 32768 - 20480})
    assert np.array_equal(np.asarray(y), 2 * np.arange(64))


@pytest.mark.parametrize("at", [48, 49, 1000, 10_000, 1_000_000, 2**31 - 1])
def test_stray_threadgroup_memory_access_is_told_with_thread_and_byte(shared, fault, at):
    with fault(rf"'declared' .*threadgroup memory .*the 192 bytes it has, at byte {4 * at}, in thread 5 of"):
        shared.declared(lab.empty(48), at, grid=48, threadgroup=48)


@pytest.mark.parametrize("at", [-10_000, -1_000_000, -(2**31)])
def test_stray_threadgroup_memory_access_before_its_start_is_told(shared, fault, at):
    with fault(rf"'declared' .*threadgroup memory .*the 192 bytes it has, at byte {4 * at}, in thread 5 of"):
        shared.declared(lab.empty(48), at, grid=48, threadgroup=48)


def test_stray_access_to_given_threadgroup_memory_is_told(shared, fault):
    with fault("'given' .*threadgroup memory outside the 192 bytes it has, at byte 192, in thread 5"):
        shared.given(lab.empty(48), 48, grid=48, threadgroup=48, threadgroup_memory={0: 192})


def test_a_stray_index_into_threadgroup_memory_changes_no_other_array(shared, bystanders):
    near = [np.zeros(4 << 20, np.float32) for _ in range(4)]
    shared.declared(lab.empty(48), 0, grid=48, threadgroup=48)
    near += [np.zeros(4 << 20, np.float32) for _ in range(4)]
    for at in range(-32 << 20, 32 << 20, 1 << 20):
        if at:
            with pytest.raises(lab.KernelFault, match="'declared'"):
                shared.declared(lab.empty(48), at, grid=48, threadgroup=48)
    assert bystanders.unchanged()
    assert not any(a.any() for a in near)


def test_a_buffer_shorter_than_its_type_is_refused_before_anything_runs(msl, fault, bystanders):
    kernel = msl(
        "struct S { float a[100]; }; kernel void k(device float* y, constant S& s) { y[0] = s.a[99]; }"
    ).k
    with fault(r"'k', buffer\(1\) 's' .*", lab.ArgumentError):
        kernel(lab.empty(1), bystanders.x, grid=1)


# ---- sources ---------------------------------------------------------------------------------------------


def test_two_kernels_of_one_name_are_told_with_both_lines(msl, fault):
    twice = "kernel void twin(device float* y) { y[0] = 1; }\n"
    with fault(
        r"cell:4:\d+: error: two kernels are called 'twin' \(the first is in line 3\)", lab.CompileError
    ):
        msl(twice * 2)


@pytest.mark.parametrize(
    "text",
    [
        "kernel void half_typed(device float* y, uint i [[thread_pos",
        "kernel void half_typed(device float* y, uint i [[thread_position_in_grid]]) {\n    y[i] = simd_",
        "kernel void half_typed(device float* y",
        "kernel void half_typed(device float* y, uint i [[thread_position_in_grid]]) { y[i] = (1 + ",
        'kernel void half_typed(device float* y) { y[0] = 1; }\nconstant char c = "',
        "/* half typed",
        "#if 1\nkernel void half_typed(device float* y) { y[0] = 1; }",
        "template <typename T> kernel void half_typed(device T* y) {",
    ],
)
def test_source_half_typed_is_told_with_a_place_in_it(msl, fault, text):
    with fault(r"^cell:\d+:\d+: error: ", lab.CompileError):
        library = msl(text)
        library.half_typed(lab.empty(1), grid=1)


# ---- integer division ------------------------------------------------------------------------------------


BARRIER = "threadgroup_barrier(mem_flags::mem_none);"
SCALARS = ["char", "uchar", "short", "ushort", "int", "uint", "long", "ulong"]


@pytest.mark.parametrize(
    ("scalar", "n", "meet"),
    [*((s, n, "") for s in SCALARS for n in (1, 4)), ("int", 1, BARRIER), ("long", 2, BARRIER)],
)
def test_integer_division_by_zero_and_overflow_go_on(msl, rng, scalar, n, meet):
    dtype = np.dtype({"char": "i1", "short": "i2", "int": "i4", "long": "i8"}[scalar.removeprefix("u")])
    dtype = np.dtype(dtype.str.replace("i", "u")) if scalar.startswith("u") else dtype
    of = scalar if n == 1 else f"{scalar}{n}"
    kernel = msl(
        f"kernel void k(const device {of}* a, const device {of}* b, device {of}* q, device {of}* r,\n"
        f"    uint i [[thread_position_in_grid]]) {{ {meet} q[i] = a[i] / b[i]; r[i] = a[i] % b[i]; }}"
    ).k
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    a = rng.integers(low, high, (64, n), dtype, endpoint=True)
    b = rng.integers(low, high, (64, n), dtype, endpoint=True)
    a[::2], b[::4] = low, 0
    b[2::4] = -1 if low else 0
    result = kernel(a, b, lab.empty(a.shape, dtype), lab.empty(a.shape, dtype), grid=64)
    sure = (b != 0) & ~((a == low) & (b == (-1 if low else 0)))
    x, y = a[sure].tolist(), b[sure].tolist()
    quotient = [abs(p) // abs(d) * (1 if (p < 0) == (d < 0) else -1) for p, d in zip(x, y, strict=True)]
    assert np.asarray(result.q)[sure].tolist() == quotient
    assert np.asarray(result.r)[sure].tolist() == [p - d * k for p, d, k in zip(x, y, quotient, strict=True)]


# ---- the process -----------------------------------------------------------------------------------------

SIGNALS = [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGURG]


def signal_actions() -> list[bytes]:
    """What the process does on each signal, as the system keeps it: handler, mask and flags."""
    libc = ctypes.CDLL(None)
    found = []
    for number in SIGNALS:
        action = ctypes.create_string_buffer(256)
        assert libc.sigaction(int(number), None, action) == 0
        # Linux: a pointer, 1024 bits of mask of which 64 are used, flags; of these 1 << 26 says only that the
        # C library once set the action. macOS: a pointer, mask, flags.
        flags = int.from_bytes(action.raw[136:140], "little") & ~(1 << 26)
        found.append(action.raw[:16] + flags.to_bytes(4, "little"))
    return found


def test_after_a_fault_the_handlers_of_before_are_back(kernels, fault, bystanders):
    was_enabled = faulthandler.is_enabled()
    runs(kernels, bystanders.x)
    before = signal_actions()
    with fault("null pointer"):
        kernels.null_write(bystanders.x, lab.empty(64), grid=64)
    assert signal_actions() == before
    assert faulthandler.is_enabled() == was_enabled


# A process of its own: `mixed(n)` provokes n faults of all kinds, one after the other.
SCRIPT = """
import faulthandler, os, resource, signal, sys, threading, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import mlx.core as mx, numpy as np, lab
sys.path.insert(0, {tests!r})
HEAD = "#include <metal_stdlib>\\nusing namespace metal;\\n"
from test_faults import BARRIERS, FAR, SOURCE, THREADGROUP, Bystanders
from test_faults import interrupted_after, runs, signal_actions

seed = {seed}
others = Bystanders(np.random.default_rng(seed))
x = others.x
plain, meeting = (lab.compile(HEAD + SOURCE, defines=d) for d in ({{}}, {{"MEETING": 1}}))
barriers, shared = lab.compile(HEAD + BARRIERS), lab.compile(HEAD + THREADGROUP)


def interrupted(call):
    with interrupted_after(0.02):
        call()


def events():
    for k in (plain, meeting):
        yield lambda k=k: k.shifted(x, lab.empty(64), FAR, 10, grid=64)
        yield lambda k=k: k.shifted(x, lab.empty(64), 1, 63, grid=64)
        yield lambda k=k: k.shifted(x, lab.empty(64), -1, 0, grid=64)
        yield lambda k=k: k.sum_outside(x, lab.empty(64), -100000, grid=64)
        yield lambda k=k: k.null_write(x, lab.empty(64), grid=64)
        yield lambda k=k: k.recursive(x, lab.empty(64), 37, grid=64)
        yield lambda k=k: k.private_8m(x, lab.empty(64), grid=64)
        yield lambda k=k: interrupted(lambda: k.endless(x, lab.empty(64), grid=64))
    yield lambda: barriers.branches(lab.empty(64), grid=64, threadgroup=64)
    yield lambda: barriers.iterations(lab.empty(64), grid=64, threadgroup=64)
    yield lambda: shared.declared(lab.empty(48), 48, grid=48, threadgroup=48)


def mixed(count):
    for library in (plain, meeting, barriers, shared):
        for kernel in library.values():
            kernel.describe()
    runs(plain, x)  # workers start with the first launch
    before, kinds = signal_actions(), list(events())
    for i in range(count):
        try:
            kinds[i % len(kinds)]()
        except (lab.KernelFault, KeyboardInterrupt):
            pass
        else:
            raise SystemExit(f"event {{i}} went by")
        assert others.unchanged(), i
        assert runs(plain, x) and runs(meeting, x), i
    assert signal_actions() == before
"""


def script(
    seed: int, body: str, *options: str, environment: dict[str, str] | None = None, **more: object
) -> subprocess.CompletedProcess[str]:
    """Run SCRIPT and ``body`` in a process of its own."""
    head = SCRIPT.format(tests=str(Path(__file__).parent), seed=seed)
    return subprocess.run(
        [sys.executable, *options, "-c", head + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), **(environment or {})},
        **more,  # type: ignore[call-overload]
    )


@pytest.mark.parametrize("options", [("-X", "faulthandler"), ()], ids=["faulthandler", "no faulthandler"])
def test_a_hundred_faults_in_a_row_leave_the_process_healthy(seed, options):
    done = script(seed, "mixed(100); print('healthy', faulthandler.is_enabled())", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"healthy {bool(options)}\n"


def test_faulthandler_still_works_after_faults(seed):
    done = script(
        seed, "mixed(19); print('alive', flush=True); faulthandler._sigsegv()", "-X", "faulthandler"
    )
    assert done.stdout == "alive\n"
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert "<string>" in done.stderr  # the traceback, with where it was


def test_a_fault_that_is_not_a_kernel_s_reaches_faulthandler_during_a_launch(seed):
    body = """
    meeting.endless.describe()
    threading.Timer(0.3, faulthandler._sigsegv).start()
    meeting.endless(x, lab.empty(64), grid=64)
    """
    done = script(seed, body, "-X", "faulthandler")
    assert done.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in done.stderr


def test_faults_while_another_thread_runs_numpy(kernels, fault, bystanders, rng):
    a = rng.standard_normal((200, 200))
    wanted, stop, wrong = a @ a, threading.Event(), []

    def multiply() -> None:
        while not stop.is_set():
            if not np.array_equal(a @ a, wanted) or np.sort(a, axis=None)[0] != a.min():
                wrong.append(1)

    thread = threading.Thread(target=multiply)
    thread.start()
    try:
        for _ in range(25):
            with fault("'shifted'"):
                kernels.shifted(bystanders.x, lab.empty(64), FAR, 10, grid=64)
            with fault("null pointer"):
                kernels.null_read(bystanders.x, lab.empty(64), grid=64)
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_launches_from_several_threads_at_once_do_not_disturb_each_other(kernels, bystanders):
    problems: list[str] = []

    def launch(number: int) -> None:
        x = np.full(1000, number, np.float32)
        for turn in range(20):
            if not runs(kernels, x):
                problems.append(f"thread {number}, launch {turn}: wrong result")
            try:
                kernels.shifted(x, lab.empty(1000), FAR, 10, grid=1000)
                problems.append(f"thread {number}, launch {turn}: no fault")
            except lab.KernelFault:
                pass

    threads = [threading.Thread(target=launch, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert bystanders.unchanged()


# What a forked child does: runs kernels, suffers faults, and dies as usual.
CHILD = """
def in_child(body):
    child = os.fork()
    if child == 0:
        try:
            body()
        except BaseException as problem:
            os.write(2, repr(problem).encode())
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]

def body():
    for k in (plain, meeting):
        assert runs(k, others.numpy)
        try:
            k.shifted(others.numpy, lab.empty(64), FAR, 10, grid=64)
        except lab.KernelFault:
            pass
        else:
            raise SystemExit("no fault")
        assert runs(k, others.numpy)
    assert others.unchanged()
"""


def test_a_forked_child_can_launch_kernels(seed):
    body = """
    mixed(19)
    assert in_child(body) == 0
    body()
    assert in_child(lambda: in_child(body) and os._exit(2)) == 0  # a grandchild
    print("fine")
    """
    done = script(seed, CHILD + textwrap.dedent(body))
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)


def test_a_child_forked_during_a_launch_can_launch_kernels(seed):
    body = """
    body()
    meeting.endless.describe()
    threading.Thread(target=lambda: meeting.endless(x, lab.empty(64), grid=64)).start()
    time.sleep(0.3)
    print("fine", in_child(body), flush=True)
    os._exit(0)
    """
    done = script(seed, CHILD + textwrap.dedent(body))
    assert (done.stdout, done.stderr, done.returncode) == ("fine 0\n", "", 0)


def test_a_child_forked_during_a_launch_can_crash(seed):
    body = """
    meeting.endless.describe()
    signal.alarm(60)
    def crash():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        faulthandler._sigsegv()
    def fork():
        time.sleep(0.3)
        child = os.fork()
        if child == 0:
            crash()
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
        os._exit(0)
    threading.Thread(target=fork).start()
    meeting.endless(x, lab.empty(64), grid=64)
    """
    done = script(seed, body)
    assert (done.stdout, done.returncode) == (f"{signal.SIGSEGV.value}\n", 0), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_memory_stays_within_arguments_one_copy_of_results_and_32_mib_per_core(seed):
    # The peak of a call is made of its arguments, the results, one copy of them (what the kernel wrote, in
    # guarded memory), and 32 MiB for each core; another 64 MiB are for all else that happens meanwhile.
    body = """
    def high():
        fields = dict(line.split(":") for line in open("/proc/self/status"))
        return int(fields["VmHWM"].split()[0]) << 10

    mx.set_cache_limit(0)
    mixed(19)
    n = 16 << 20  # 64 MiB
    big = np.ones(n, np.float32)
    start = high()
    for k in (plain, meeting) * 4:
        y = k.doubled(big, big, grid=1 << 14, threadgroup=1024)  # all of `big` is copied
        assert y[0].item() == 2
        del y
        try:
            k.shifted(big, big, FAR, 10, grid=1 << 14, threadgroup=1024)
        except lab.KernelFault:
            pass
    allowed = 2 * 4 * n + (32 << 20) * len(os.sched_getaffinity(0)) + (64 << 20)
    print("grown by", high() - start, "of", allowed, file=sys.stderr)
    print(high() - start <= allowed)
    """
    done = script(seed, body)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("gigabytes", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_rationed_address_space_leaves_room_for_everybody_else(seed, gigabytes):
    body = f"""
    mixed(19)
    for n in (100, 1 << 20, 1 << 26):
        for k in (plain, meeting):
            assert k.doubled(np.ones(n, np.float32), lab.empty(n), grid=100)[99].item() == 2
    status = dict(line.split(":") for line in open("/proc/self/status"))
    print(int(status["VmSize"].split()[0]) << 10 < {gigabytes << 30} // 2)
    """
    import resource

    limit = gigabytes << 30
    done = script(seed, body, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc/self/maps")
def test_a_machine_of_many_cores_runs_kernels_whose_threads_meet(seed):
    body = """
    import lab.engines.cpu.native as native
    native._cores = lambda: 96
    y = meeting.doubled(np.ones(1 << 18, np.float32), lab.empty(1 << 18), grid=1 << 18, threadgroup=1024)
    assert (np.asarray(y) == 2).all()
    print(sum(1 for _ in open("/proc/self/maps")) < 40000)
    """
    done = script(seed, body)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


# ---- isolation -------------------------------------------------------------------------------------------


def test_isolated_launches_give_the_same_results(kernels, bystanders, rng):
    x, y = mx.array(rng.standard_normal(1000, dtype=np.float32)), lab.empty(1000)
    for result in (kernels.doubled(x, y, grid=1000, isolate=True), kernels.doubled(x, y, grid=1000)):
        assert result.dtype == mx.float32
        assert np.array_equal(np.asarray(result), 2 * np.asarray(x))
    assert bystanders.unchanged()


def test_a_library_compiled_to_isolate_isolates_every_call(msl, fault):
    kernels = msl(SOURCE, isolate=True)
    assert np.array_equal(np.asarray(kernels.doubled(mx.ones(8), lab.empty(8), grid=8)), 2 * np.ones(8))
    with fault(r"'shifted' .*buffer\(1\) 'y': .*\(element \d+; it has 8\)"):
        kernels.shifted(mx.ones(8), lab.empty(8), FAR, 3, grid=8)


def test_faults_of_isolated_launches_are_told_as_ever(kernels, fault, bystanders):
    with fault(r"'shifted' .*buffer\(1\) 'y': \d+ bytes after its end \(element \d+; it has 64\)"):
        kernels.shifted(bystanders.x, lab.empty(64), FAR, 10, grid=64, isolate=True)
    with fault(r"'shifted' .*just after its end \(element 64; it has 64\)"):
        kernels.shifted(bystanders.x, lab.empty(64), 1, 63, grid=64, isolate=True)
    with fault("through a null pointer"):
        kernels.null_write(bystanders.x, lab.empty(64), grid=64, isolate=True)
    with fault("ran out of stack"):
        kernels.recursive(bystanders.x, lab.empty(64), 37, grid=64, isolate=True)
    assert np.array_equal(
        np.asarray(kernels.doubled(bystanders.x, lab.empty(64), grid=64, isolate=True)),
        2 * np.asarray(bystanders.x),
    )


def test_an_unmet_barrier_of_an_isolated_launch_is_told(barriers, fault):
    with fault("'branches' has a barrier that not all threads of threadgroup 0 reach: thread 0 waits"):
        barriers.branches(lab.empty(64), grid=64, threadgroup=64, isolate=True)


def test_oversize_threadgroup_memory_of_an_isolated_launch_is_refused(shared, fault):
    with fault("'both' would use 40960 bytes", lab.ArgumentError):
        shared.both(lab.empty(64), grid=64, threadgroup_memory={0: 20480}, isolate=True)


def test_an_isolated_kernel_cannot_change_live_memory_through_a_made_up_pointer(kernels, bystanders):
    victims = [np.zeros(1 << 22, np.float32), np.zeros(16, np.float32)]
    for victim in victims:
        address = victim.__array_interface__["data"][0]
        try:
            kernels.made_up(lab.empty(64), address, grid=64, isolate=True)
        except lab.KernelFault as problem:
            assert "'made_up'" in str(problem)
        assert not victim.any()
    assert bystanders.unchanged()


def children_of(process: int) -> list[int]:
    found = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = [tuple(map(int, line.split())) for line in found.splitlines()]
    return [child for child, parent in pairs if parent == process]


def wait_for(condition: Callable[[], object]) -> object:
    """The condition's value once it has one. The limit is for a test that fails."""
    until = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < until
        time.sleep(0.02)
    return value


def test_a_killed_child_is_told_and_the_next_launch_works(kernels, fault, bystanders):
    from lab.engines.cpu.isolated import helper

    kernels.doubled(bystanders.x, lab.empty(64), grid=64, isolate=True)
    process = helper()._process
    assert process is not None

    def kill() -> None:
        os.kill(wait_for(lambda: children_of(process.pid))[0], signal.SIGKILL)  # type: ignore[index]

    killer = threading.Thread(target=kill)
    killer.start()
    with fault(r"'endless' brought down the process it was isolated in \(SIGKILL\); this one is untouched"):
        kernels.endless(bystanders.x, lab.empty(64), grid=64, isolate=True)
    killer.join()
    result = kernels.doubled(bystanders.x, lab.empty(64), grid=64, isolate=True)
    assert np.array_equal(np.asarray(result), 2 * np.asarray(bystanders.x))
    assert helper()._process is process


def test_a_killed_helper_is_told_and_the_next_launch_works(kernels, fault, bystanders):
    from lab.engines.cpu.isolated import helper

    kernels.doubled(bystanders.x, lab.empty(64), grid=64, isolate=True)
    process = helper()._process
    assert process is not None
    running: list[int] = []

    def kill() -> None:
        running.extend(wait_for(lambda: children_of(process.pid)))  # type: ignore[arg-type]
        os.kill(process.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with fault("'endless' took its helper process with it"):
        kernels.endless(bystanders.x, lab.empty(64), grid=64, isolate=True)
    killer.join()
    wait_for(lambda: not alive(running[0]))
    result = kernels.doubled(bystanders.x, lab.empty(64), grid=64, isolate=True)
    assert np.array_equal(np.asarray(result), 2 * np.asarray(bystanders.x))


def alive(process: int) -> bool:
    """Whether a process runs (one that has ended and waits to be collected does not)."""
    found = subprocess.run(["ps", "-o", "state=", "-p", str(process)], capture_output=True, text=True).stdout
    return bool(found.strip()) and not found.strip().startswith("Z")


def test_an_isolated_endless_loop_is_interrupted(kernels, bystanders):
    kernels.doubled(bystanders.x, lab.empty(64), grid=64, isolate=True)
    kernels.endless.describe()
    with pytest.raises(KeyboardInterrupt), interrupted_after(0.5):
        kernels.endless(bystanders.x, lab.empty(64), grid=64, isolate=True)
    assert bystanders.unchanged()
    result = kernels.doubled(bystanders.x, lab.empty(64), grid=64, isolate=True)
    assert np.array_equal(np.asarray(result), 2 * np.asarray(bystanders.x))


def test_an_isolated_endless_loop_ends_with_the_process_that_asked_for_it(seed):
    body = """
    from lab.engines.cpu.isolated import helper
    plain.doubled(x, lab.empty(64), grid=64, isolate=True)
    print(helper()._process.pid, flush=True)
    plain.endless(x, lab.empty(64), grid=64, isolate=True)
    """
    head = SCRIPT.format(tests=str(Path(__file__).parent), seed=seed)
    asking = subprocess.Popen(
        [sys.executable, "-c", head + textwrap.dedent(body)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
    )
    assert asking.stdout is not None
    helper = int(asking.stdout.readline())
    running = wait_for(lambda: children_of(helper))
    asking.kill()
    asking.communicate()
    for process in (helper, *running):  # type: ignore[misc]
        wait_for(lambda process=process: not alive(process))


def test_a_forked_child_isolates_with_a_helper_of_its_own(seed):
    body = """
    def isolated():
        y = plain.doubled(others.numpy, lab.empty(64), grid=64, isolate=True)
        assert np.array_equal(np.asarray(y), 2 * others.numpy)

    from lab.engines.cpu.isolated import helper
    isolated()
    mine = helper()._process.pid
    assert in_child(isolated) == 0
    isolated()
    assert helper()._process.pid == mine
    print("fine")
    """
    done = script(seed, CHILD + textwrap.dedent(body))
    assert (done.stdout, done.stderr, done.returncode) == ("fine\n", "", 0)
