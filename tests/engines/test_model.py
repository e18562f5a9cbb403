from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from lab import ir
from lab.engines.model import (
    BarrierError,
    Launch,
    MemoryFault,
    Outcome,
    RecursionLimitError,
    StepLimitError,
    Trap,
    Unmodelled,
    run,
)
from lab.errors import ArgumentError
from tests.engines.divergence import Generator
from tests.ir.snippets import kernel


def launched(
    module: ir.Module,
    *arrays: np.ndarray,
    threads: int | tuple[int, int, int] = 32,
    size: int | tuple[int, int, int] | None = None,
    **more,
) -> tuple[list[np.ndarray], Outcome]:
    """Run on copies of ``arrays``, buffer by buffer; what they hold afterwards."""
    grid = (threads, 1, 1) if isinstance(threads, int) else threads
    group = grid if size is None else (size, 1, 1) if isinstance(size, int) else size
    limit = more.pop("step_limit", 10_000_000)
    buffers = {i: bytearray(a.tobytes()) for i, a in enumerate(arrays)}
    outcome = run(module, Launch(buffers, grid, group, **more), trace=True, step_limit=limit)
    return [np.frombuffer(buffers[i], a.dtype).reshape(a.shape) for i, a in enumerate(arrays)], outcome


def words(
    body: str, threads: int = 32, *, before: str = "", x: np.ndarray | None = None, **more
) -> list[int]:
    """What each thread leaves in its word ``out[tid]`` of buffer 0, which held ``x``."""
    start = np.zeros(threads, np.uint32) if x is None else x
    module = kernel(f"device uint* out = buffer<uint>(g, 0);\n{body}", before=before)
    (out,), outcome = launched(module, start, threads=threads, **more)
    assert not outcome.reports
    return out.tolist()


def masks(body: str, threads: int = 32, **more) -> list[int]:
    """As ``words``, with ``mask()`` for the lanes that take part in a call of it."""
    return words(body.replace("mask()", "(uint)__msl_simd_ballot(1)"), threads, **more)


def of(lanes: Callable[[int], bool] | range) -> int:
    chosen = lanes if isinstance(lanes, range) else [lane for lane in range(32) if lanes(lane)]
    return sum(1 << lane for lane in chosen)


EVERYONE = of(range(32))


# ---- who takes part --------------------------------------------------------------------------------------


def test_both_sides_of_a_branch_meet_on_their_own_and_all_meet_behind_it():
    body = """
    uint in;
    if (tid % 3 == 0) in = mask(); else in = mask();
    out[tid] = in ^ mask();
    """
    threes = of(lambda lane: lane % 3 == 0)
    assert masks(body) == [EVERYONE ^ (threes if lane % 3 == 0 else EVERYONE ^ threes) for lane in range(32)]


def test_lanes_that_returned_do_not_count():
    body = "if (tid % 4 == 1) return; out[tid] = mask(); if (tid < 8) return; out[tid] = mask();"
    first = of(lambda lane: lane % 4 != 1)
    expected = [first if lane < 8 else first & ~255 for lane in range(32)]
    assert masks(body) == [0 if lane % 4 == 1 else expected[lane] for lane in range(32)]


def test_the_same_call_in_different_iterations_is_no_meeting():
    body = "for (uint i = 0; i < tid % 5; ++i) { if (i == tid % 5 - 1) out[tid] = mask(); }"
    assert masks(body) == [of(lambda o, n=lane % 5: o % 5 == n) if lane % 5 else 0 for lane in range(32)]


def test_a_loop_holds_the_lanes_that_have_not_left_it():
    body = "for (uint i = 0; i < tid % 4; ++i) out[tid] = out[tid] * 3 + mask();"
    expected = []
    for lane in range(32):
        value = 0
        for i in range(lane % 4):
            value = (value * 3 + of(lambda other, i=i: other % 4 > i)) & EVERYONE
        expected.append(value)
    assert masks(body) == expected


def test_break_and_continue_take_lanes_out_of_an_iteration_only():
    body = """
    for (uint i = 0; i < 3; ++i) {
        if (tid % 8 == i) continue;
        if (tid % 8 == i + 4) break;
        out[tid] = (out[tid] << 8) ^ mask();
    }
    """
    expected = []
    for lane in range(32):
        value = 0
        for i in range(3):
            if lane % 8 == i:
                continue
            if lane % 8 == i + 4:
                break
            here = of(lambda o, i=i: o % 8 != i and not 4 <= o % 8 <= i + 4)
            value = (value << 8 & EVERYONE) ^ here
        expected.append(value)
    assert masks(body) == expected


@pytest.mark.parametrize("leave", ["break", "return"])
def test_a_call_before_leaving_a_loop_is_still_in_its_iteration(leave):
    body = f"for (uint i = 0; ; ++i) {{ if (i == tid % 3) {{ out[tid] = mask(); {leave}; }} }}"
    assert masks(body) == [of(lambda o, r=lane % 3: o % 3 == r) for lane in range(32)]


def test_a_call_behind_a_loop_is_met_by_all_whatever_iteration_they_left_it_in():
    assert masks("for (uint i = 0; ; ++i) { if (i == tid % 3) break; } out[tid] = mask();") == [EVERYONE] * 32


def test_a_loop_in_a_loop_counts_anew_in_each_round():
    # Lane l turns the inner loop l % 2 + 1 times in each of two rounds; rounds do not meet each other.
    body = """
    for (uint i = 0; i < 2; ++i)
        for (uint j = 0; j <= tid % 2; ++j)
            if (i == 1 && j == 0 || i == 0 && j == 1) out[tid] ^= mask();
    """
    odd = of(lambda lane: lane % 2 == 1)
    assert masks(body) == [EVERYONE ^ (odd if lane % 2 else 0) for lane in range(32)]


def test_a_loop_that_leads_only_out_of_another_counts_its_rounds_too():
    body = """
    for (uint i = 0; ; ++i) {
        if (i == tid % 2) {
            for (uint j = 0; j < 2; ++j) out[tid] = out[tid] * 2 + mask();
            break;
        }
    }
    """
    half = [of(lambda o, r=r: o % 2 == r) for r in range(2)]
    assert masks(body) == [half[lane % 2] * 3 & EVERYONE for lane in range(32)]


def test_a_helper_called_from_two_places_is_two_places_to_meet():
    helper = "static uint here() { return (uint)__msl_simd_ballot(1); }"
    low = of(range(10))
    assert masks("out[tid] = tid < 10 ? here() : here();", before=helper) == [
        low if lane < 10 else EVERYONE ^ low for lane in range(32)
    ]


def test_a_helper_called_from_one_place_is_one_place_to_meet():
    helper = "static uint here() { return (uint)__msl_simd_ballot(1); }"
    assert masks("uint x = tid; if (tid < 10) x += 1; out[tid] = here();", before=helper) == [EVERYONE] * 32


def test_a_function_called_through_an_address_is_one_place_to_meet():
    helper = """
    static uint low() { return (uint)__msl_simd_ballot(1); }
    static uint high() { return (uint)__msl_simd_ballot(1); }
    """
    body = "uint (*f)() = tid < 10 ? low : high; out[tid] = f();"
    ten = of(range(10))
    assert masks(body, before=helper) == [ten if lane < 10 else EVERYONE ^ ten for lane in range(32)]


def test_a_switch_meets_in_the_case_fallen_into():
    body = """
    switch (tid % 4) {
        case 0: out[tid] = mask();
        case 1: out[tid] ^= mask(); break;
        case 2: return;
        default: out[tid] = mask();
    }
    """
    remainder = [of(lambda o, r=r: o % 4 == r) for r in range(4)]
    pair = remainder[0] | remainder[1]
    by_case = [remainder[0] ^ pair, pair, 0, remainder[3]]
    assert masks(body) == [by_case[lane % 4] for lane in range(32)]


def test_a_condition_that_depends_on_a_meeting_splits_who_comes_next():
    body = """
    uint n = tid;
    while (__msl_simd_ballot(n > 20)) { if (n > 20) n -= 3; out[tid] += 1; }
    """
    assert words(body) == [4] * 32


def test_lanes_wait_for_one_that_takes_long():
    body = "for (uint i = 0; i < (tid == 7 ? 9000u : 0u); ++i) out[tid] += 1; out[tid] = mask();"
    assert masks(body) == [EVERYONE] * 32


def test_a_meeting_is_held_while_a_lane_that_cannot_come_runs_on():
    # Lane 0 waits in a loop for what the others do after they have met.
    body = """
    device uint* flag = buffer<uint>(g, 0) + 32;
    if (tid == 0) { while (__atomic_load_n(flag, __ATOMIC_RELAXED) == 0); out[0] = 1; }
    else { out[tid] = mask(); if (tid == 1) __atomic_store_n(flag, 1, __ATOMIC_RELAXED); }
    """
    found = masks(body, x=np.zeros(33, np.uint32))[:32]
    assert found == [1] + [EVERYONE - 1] * 31


def test_simdgroups_are_of_32_lanes_and_the_last_has_what_is_left():
    assert masks("out[tid] = mask();", 70) == [EVERYONE] * 64 + [63] * 6


@pytest.mark.parametrize("number", range(24))
def test_random_programs_compute_what_masks_say(number, seed):
    seed += number
    program = Generator(seed)
    x = np.random.default_rng(seed).integers(1 << 32, size=29, dtype=np.uint32)
    assert words("out[tid] = program(out[tid]);", 29, before=program.source, x=x) == program.run(x.tolist())


@pytest.mark.parametrize(
    "flags", [("-O2", "-Xclang", "-disable-llvm-passes", "-gline-tables-only"), ("-O0", "-g")]
)
def test_unoptimised_code_keeps_who_meets(flags, seed):
    program = Generator(seed)
    x = np.random.default_rng(seed).integers(1 << 32, size=32, dtype=np.uint32)
    module = kernel(
        "device uint* out = buffer<uint>(g, 0); out[tid] = program(out[tid]);", *flags, before=program.source
    )
    (out,), _ = launched(module, x)
    assert out.tolist() == program.run(x.tolist())


def test_irreducible_control_flow_is_refused_where_lanes_meet():
    text = """
    declare i64 @__msl_simd_ballot(i32) convergent
    define void @msl_thread(ptr %g, i32 %tid) {
      %c = icmp ult i32 %tid, 3
      br i1 %c, label %a, label %b
    a:
      %m = call i64 @__msl_simd_ballot(i32 1)
      br label %b
    b:
      %d = icmp ult i32 %tid, 100
      br i1 %d, label %a, label %out
    out:
      ret void
    }
    """
    with pytest.raises(Unmodelled, match=r"msl_thread.*irreducible"):
        launched(ir.parse(text))
    without = text.replace("call i64 @__msl_simd_ballot(i32 1)", "zext i32 %tid to i64").replace("100", "0")
    launched(ir.parse(without))


def test_the_trace_lists_who_met_where():
    module = kernel("for (uint i = 0; i < tid; ++i)\n  __msl_simd_ballot(1);\n__msl_threadgroup_barrier(0);")
    _, outcome = launched(module, threads=3)
    assert [(m.name, m.iterations, m.threads) for m in outcome.meetings] == [
        ("__msl_simd_ballot", (0,), (1, 2)),
        ("__msl_simd_ballot", (1,), (2,)),
        ("__msl_threadgroup_barrier", (), (0, 1, 2)),
    ]
    assert [m.location and m.location.line for m in outcome.meetings] == [2, 2, 3]


# ---- what collectives compute ----------------------------------------------------------------------------


def collective(expression: str, out: str, x: np.ndarray, lanes: str = "true") -> np.ndarray:
    kind = {"uint32": "uint", "int32": "int", "float32": "float", "uint64": "ulong"}[str(x.dtype)]
    body = f"{kind} x = buffer<{kind}>(g, 0)[tid]; if ({lanes}) buffer<{out}>(g, 1)[tid] = {expression};"
    (_, result), outcome = launched(kernel(body), x, np.zeros_like(x), threads=x.size)
    assert not outcome.reports
    return result


def test_reductions_go_over_the_lanes_that_take_part(rng):
    x = rng.integers(1 << 32, size=32, dtype=np.uint32)
    part = np.arange(32) % 3 != 0
    some = x[part].astype(object)
    for name, expected in [
        ("sum", sum(some) & EVERYONE),
        ("product", math.prod(some) & EVERYONE),
        ("max", max(some)),
        ("and", int(np.bitwise_and.reduce(x[part]))),
    ]:
        got = collective(f"__msl_simd_{name}_u32(x)", "uint", x, "tid % 3 != 0")
        assert got.tolist() == [expected if p else 0 for p in part]
    assert (
        collective("__msl_simd_max_i32(x)", "int", x.view(np.int32)).tolist() == [x.view(np.int32).max()] * 32
    )
    wide = rng.integers(1 << 63, size=32, dtype=np.uint64) * 2 + 1
    assert collective("__msl_simd_sum_u64(x)", "ulong", wide).tolist() == [int(wide.sum())] * 32
    assert collective("__msl_simd_xor_u64(x)", "ulong", wide)[0] == np.bitwise_xor.reduce(wide)


def test_float_reductions_are_in_single_precision_and_ignore_nans(rng):
    x = rng.standard_normal(32).astype(np.float32)
    total = np.float32(x[0])
    for value in x[1:]:
        total = np.float32(total + value)
    assert (collective("__msl_simd_sum_f32(x)", "float", x) == total).all()
    x[[0, 5]] = np.nan
    assert (collective("__msl_simd_max_f32(x)", "float", x) == np.nanmax(x)).all()
    assert (collective("__msl_simd_min_f32(x)", "float", x) == np.nanmin(x)).all()
    assert np.isnan(collective("__msl_simd_sum_f32(x)", "float", x)).all()


def test_prefixes_run_over_the_lanes_that_take_part(rng):
    x = rng.integers(1 << 32, size=32, dtype=np.uint32)
    part = np.arange(32) % 5 != 1
    below = np.cumsum(np.where(part, x, 0), dtype=np.uint32) - np.where(part, x, 0).astype(np.uint32)
    got = collective("__msl_simd_prefix_exclusive_sum_u32(x)", "uint", x, "tid % 5 != 1")
    assert (got == np.where(part, below, 0)).all()
    y = rng.uniform(0.5, 1.5, 32).astype(np.float32)
    got = collective("__msl_simd_prefix_inclusive_product_f32(x)", "float", y)
    assert (got == np.multiply.accumulate(y, dtype=np.float32)).all()


def test_moves_bring_bits_from_another_lane(rng):
    x = rng.integers(1 << 32, size=32, dtype=np.uint32)
    lane = np.arange(32)
    assert (
        collective("__msl_simd_shuffle(x, (tid * 7 + 3) % 32)", "uint", x) == x[(lane * 7 + 3) % 32]
    ).all()
    got = collective("__msl_simd_broadcast_first(x)", "uint", x, "tid > 4")
    assert (got == np.where(lane > 4, x[5], 0)).all()
    assert (collective("__msl_lane()", "uint", np.tile(x, 3)) == np.tile(lane, 3)).all()


def test_quads_are_four_lanes_each(rng):
    x = rng.integers(1 << 32, size=32, dtype=np.uint32)
    sums = x.reshape(8, 4).sum(1, dtype=np.uint32).repeat(4)
    assert (collective("__msl_quad_sum_u32(x)", "uint", x) == sums).all()
    turned = x.reshape(8, 4)[:, [1, 2, 3, 0]].ravel()
    assert (collective("__msl_quad_shuffle(x, (tid + 1) % 4)", "uint", x) == turned).all()
    got = collective("(uint)__msl_quad_ballot(1)", "uint", x, "tid % 8 != 2")
    assert got.tolist() == ([11, 11, 0, 11] + [15] * 4) * 4


def test_a_quad_does_not_wait_for_the_rest_of_the_simdgroup():
    # The others come to the quad operation only after a barrier, at which the first quad never arrives.
    body = "if (tid >= 4) __msl_threadgroup_barrier(0); out[tid] = __msl_quad_sum_u32(tid);"
    assert words(body, 8) == [6] * 4 + [22] * 4


def test_a_shuffle_from_a_lane_that_is_not_there_gives_zero_and_is_reported():
    module = kernel("if (tid < 4)\n  buffer<uint>(g, 0)[tid] = __msl_simd_shuffle(tid + 10, tid + 2);")
    (out,), outcome = launched(module, np.full(32, 99, np.uint32))
    assert out[:5].tolist() == [12, 13, 0, 0, 99]
    (report,) = outcome.reports
    assert (report.thread.index, report.count) == (2, 2)
    assert "does not take part" in report.what and report.location is not None and report.location.line == 2
    assert "thread (2, 0, 0)" in str(report)


# ---- barriers --------------------------------------------------------------------------------------------


def test_threads_exchange_values_through_threadgroup_memory_at_a_barrier():
    body = """
    threadgroup uint* shared = (threadgroup uint*)g->threadgroup_memory;
    for (uint round = 0; round < 3; ++round) {
        shared[tid] = tid * 10 + round;
        __msl_threadgroup_barrier(1);
        out[tid] += shared[(tid + 1) % 100];
        __msl_threadgroup_barrier(1);
    }
    """
    assert words(body, 100) == [(tid + 1) % 100 * 30 + 3 for tid in range(100)]


def test_variables_in_threadgroup_memory_are_the_groups_own():
    body = """
    threadgroup uint* a = (threadgroup uint*)msl_threadgroup_block(0, 8);
    threadgroup uint* b = (threadgroup uint*)msl_threadgroup_block(1, 4);
    out[g->position[0] * 2 + tid] = a[tid] + *b;
    __msl_threadgroup_barrier(1);
    a[tid] = 5; *b = 7;
    """
    assert words(body, 6, size=2, fill=0) == [0] * 6
    with pytest.raises(MemoryFault, match="threadgroup variable 1, which has 4: 4 outside"):
        words("((threadgroup uint*)msl_threadgroup_block(1, 4))[1] = 3;", 1)


def test_threads_that_returned_are_not_waited_for_at_a_barrier():
    assert (
        words("if (tid > 40) return; __msl_threadgroup_barrier(0); out[tid] = 1;", 64) == [1] * 41 + [0] * 23
    )


def test_two_barriers_are_not_the_same_one():
    module = kernel("if (tid < 40)\n  __msl_threadgroup_barrier(0);\nelse\n  __msl_threadgroup_barrier(0);")
    with pytest.raises(BarrierError) as caught:
        launched(module, threads=64)
    first, second = caught.value.waiting
    assert first.threads == tuple(range(40)) and second.threads == tuple(range(40, 64))
    assert first.location is not None and (first.location.line, second.location and second.location.line) == (
        2,
        4,
    )
    assert "__msl_threadgroup_barrier at body:2:3: threads 0-39" in str(caught.value)


def test_a_barrier_in_another_iteration_is_another_barrier():
    body = "for (uint i = 0; i < 3; ++i) { if (i == tid % 2) continue; __msl_threadgroup_barrier(0); }"
    with pytest.raises(BarrierError, match=r"in iteration 1: threads 0.*in iteration 0: threads 1"):
        launched(kernel(body), threads=2)


def test_a_barrier_that_others_pass_by_into_a_collective_is_an_error():
    module = kernel("if (tid < 4)\n  __msl_threadgroup_barrier(0);\n__msl_simd_ballot(1);")
    with pytest.raises(
        BarrierError, match=r"barrier at body:2.*threads 0-3; __msl_simd_ballot.*threads 4-31"
    ):
        launched(module)


def test_a_collective_that_the_others_cannot_reach_any_more_is_held_before_a_barrier():
    body = "if (tid < 4) out[tid] = mask(); __msl_threadgroup_barrier(0); out[tid] ^= mask();"
    assert masks(body, 40) == [EVERYONE ^ 15] * 4 + [EVERYONE] * 28 + [255] * 8


def test_a_simdgroup_barrier_not_met_by_all_is_reported_and_passes():
    module = kernel(
        "__msl_simdgroup_barrier(0); if (tid < 4) __msl_simdgroup_barrier(0); __msl_simd_ballot(1);"
        "if (tid >= 4) return; __msl_simdgroup_barrier(0);"
    )
    _, outcome = launched(module, threads=40)
    (report,) = outcome.reports
    assert "simdgroup barrier" in report.what and report.count == 1


# ---- the dispatch ----------------------------------------------------------------------------------------

POSITIONS = """
device uint* out = buffer<uint>(g, 0);
uint x = tid % g->size[0], y = tid / g->size[0] % g->size[1], z = tid / (g->size[0] * g->size[1]);
uint gx = g->position[0] * g->launch->size[0] + x, gy = g->position[1] * g->launch->size[1] + y;
uint gz = g->position[2] * g->launch->size[2] + z;
uint order = __atomic_fetch_add(out, 1, __ATOMIC_RELAXED);
device uint* mine = out + 1 + ((gz * g->launch->grid[1] + gy) * g->launch->grid[0] + gx) * 4;
mine[0] = order; mine[1] = g->size[0] | g->size[1] << 8 | g->size[2] << 16;
mine[2] = g->position[0] | g->position[1] << 8 | g->position[2] << 16;
mine[3] = g->launch->groups[0] | g->launch->groups[1] << 8 | g->launch->groups[2] << 16;
"""


@pytest.mark.parametrize(
    ("grid", "size"),
    [((70, 1, 1), (32, 1, 1)), ((7, 5, 1), (4, 2, 1)), ((5, 3, 4), (2, 2, 3)), ((3, 1, 1), (8, 2, 1))],
)
def test_partial_groups_have_the_size_that_is_left(grid, size):
    count = math.prod(grid)
    (out,), outcome = launched(kernel(POSITIONS), np.zeros(1 + 4 * count, np.uint32), threads=grid, size=size)
    assert out[0] == count and not outcome.reports
    cells = out[1:].reshape(grid[2], grid[1], grid[0], 4)

    def packed(values) -> int:
        return int(values[0]) | int(values[1]) << 8 | int(values[2]) << 16

    groups = [-(-g // s) for g, s in zip(grid, size, strict=True)]
    order = []
    for z, y, x in np.ndindex(grid[2], grid[1], grid[0]):
        group = [p // s for p, s in zip((x, y, z), size, strict=True)]
        here = [min(s, g - p * s) for s, g, p in zip(size, grid, group, strict=True)]
        assert cells[z, y, x, 1:].tolist() == [packed(here), packed(group), packed(groups)]
        linear = (group[2] * groups[1] + group[1]) * groups[0] + group[0]
        order.append((linear, int(cells[z, y, x, 0])))
    # Groups run one after the other, in increasing linear order.
    assert [group for group, _ in sorted(order, key=lambda pair: pair[1])] == sorted(
        group for group, _ in order
    )


def test_whole_groups_can_be_asked_for():
    launch = Launch.of_groups({}, (3, 2, 1), (4, 8, 1))
    assert launch.grid == (12, 16, 1) and launch.groups == (3, 2, 1)


def test_sizes_of_threadgroup_arguments_are_passed_on():
    body = (
        "buffer<uint>(g, 0)[0] = g->launch->threadgroup_bytes[3]; buffer<uint>(g, 0)[1] = g->launch->grid[0];"
    )
    (out,), _ = launched(kernel(body), np.zeros(2, np.uint32), threads=1, threadgroup_bytes={3: 48})
    assert out.tolist() == [48, 1]


def test_what_no_gpu_takes_is_refused():
    with pytest.raises(ArgumentError, match="more than 1024"):
        Launch({}, (2048, 1, 1), (1025, 1, 1))
    with pytest.raises(ArgumentError, match="threadgroup memory"):
        Launch({}, (1, 1, 1), (1, 1, 1), threadgroup_memory=40000)
    with pytest.raises(ArgumentError, match="no dispatch"):
        Launch({}, (0, 1, 1), (1, 1, 1))
    with pytest.raises(ArgumentError, match="between 0 and 31"):
        Launch({32: bytearray()}, (1, 1, 1), (1, 1, 1))


def test_a_full_threadgroup_runs():
    body = """
    threadgroup float* shared = (threadgroup float*)g->threadgroup_memory;
    shared[tid] = buffer<float>(g, 0)[tid];
    __msl_threadgroup_barrier(1);
    for (uint s = 512; s > 0; s >>= 1) {
        if (tid < s) shared[tid] += shared[tid + s];
        __msl_threadgroup_barrier(1);
    }
    buffer<float>(g, 0)[tid] = shared[0];
    """
    x = np.arange(1024, dtype=np.float32)
    (out,), _ = launched(kernel(body), x, threads=1024)
    assert (out == x.sum()).all()


# ---- memory ----------------------------------------------------------------------------------------------


def fault(body: str, *arrays: np.ndarray, threads: int = 4, **more) -> MemoryFault:
    with pytest.raises(MemoryFault) as caught:
        launched(kernel(body), *arrays, threads=threads, **more)
    return caught.value


BYTES = np.zeros(40, np.uint8)


def test_a_write_past_a_buffer_names_buffer_place_thread_and_line():
    problem = fault("device uint* p = buffer<uint>(g, 1);\nif (tid == 2)\n  p[13] = 1;", BYTES, BYTES)
    assert (problem.buffer, problem.offset, problem.size, problem.outside) == (1, 52, 4, 16)
    assert problem.write and problem.thread is not None and problem.thread.grid == (2, 0, 0)
    assert problem.location is not None and problem.location.line == 3
    assert str(problem) == (
        "write of 4 bytes at byte 52 of buffer 1, which has 40: 16 outside it, "
        "by thread (2, 0, 0) (threadgroup (0, 0, 0), index 2), at body:3:9."
    )


@pytest.mark.parametrize(
    ("access", "offset", "outside"),
    [
        ("((device uint*)(p + 38))[0]", 38, 2),
        ("*(device uint*)(p - 6)", -6, 6),
        ("*(device uint*)(p - (1l << 33))", -(1 << 33), 1 << 33),
        ("((device ulong*)p)[0xffffffffu]", 8 * 0xFFFFFFFF, 8 * 0xFFFFFFFF + 8 - 40),
    ],
)
def test_a_read_outside_of_a_buffer_says_how_far(access, offset, outside):
    problem = fault(f"device uchar* p = buffer<uchar>(g, 0); volatile ulong x = {access};", BYTES, BYTES)
    assert (problem.buffer, problem.offset, problem.outside, problem.write) == (0, offset, outside, False)


def test_null_and_wild_pointers_are_faults():
    assert "null pointer" in str(fault("buffer<uint>(g, 5)[1] = 3;"))
    problem = fault("*(device uint*)0x123456789abcdef = 3;")
    assert "near no object" in str(problem) and problem.offset is None


def test_threadgroup_memory_stack_and_tables_have_bounds():
    problem = fault("((threadgroup uint*)g->threadgroup_memory)[3] = 1;", threadgroup_memory=12)
    assert (problem.target, problem.outside) == ("the threadgroup memory", 4)
    problem = fault("uint room[4]; room[tid + 2] = 1;")
    assert problem.target == "the variable room of msl_thread" and problem.offset == 16
    module = kernel("volatile float x = tab[tid];", before="static const __global float tab[3] = {1, 2, 3};")
    with pytest.raises(MemoryFault, match=r"read of 4 bytes at byte 12 of the program's variable \w*tab"):
        launched(module)


def test_what_may_only_be_read_is_not_written():
    problem = fault("buffer<uint>(g, 1)[0] = 1;", BYTES, BYTES, read_only=frozenset((1,)))
    assert problem.outside == 0 and problem.buffer == 1 and "read only" in str(problem)
    module = kernel("*(__global float*)tab = 1;", before="static const __global float tab[3] = {1, 2, 3};")
    with pytest.raises(MemoryFault, match="read only"):
        launched(module)


def test_a_variable_is_gone_when_its_function_has_returned():
    helper = "static int* lost() { int x = 3; int* p = &x; return p; }"
    with pytest.raises(MemoryFault, match="near no object"):
        launched(kernel("*lost() = 4;", before=helper))


def test_an_address_less_aligned_than_promised_is_reported():
    module = kernel(
        "*(device ulong*)(buffer<uchar>(g, 0) + 2) = 3;\n*(device uint*)(buffer<uchar>(g, 0) + 8) = 1;"
    )
    _, outcome = launched(module, BYTES, threads=1)
    (report,) = outcome.reports
    assert "no multiple of" in report.what and report.location is not None and report.location.line == 1


def test_pointers_survive_integers_and_bytes_keep_their_order():
    body = """
    ulong address = (ulong)buffer<uint>(g, 0);
    device uint* p = (device uint*)(address + 4 * tid);
    *p = 0x01020304 + tid;
    device uchar* b = (device uchar*)p;
    p[8] = b[0] << 24 | b[1] << 16 | b[2] << 8 | b[3];
    """
    (out,), _ = launched(kernel(body), np.zeros(16, np.uint32), threads=8)
    assert out[8:].tolist() == [int(v).__index__() for v in out[:8].byteswap()]


def test_structs_pass_by_value_and_copies_are_copies():
    helper = """
    struct Big { float a[10]; char c; half h; };
    static Big make(float x) { Big b = {}; b.a[3] = x; b.h = (half)x; b.c = 'q'; return b; }
    static float spoil(Big b) { b.a[3] = -1; return (float)b.h; }
    """
    body = """
    Big b = make((float)tid), c = b;
    c.a[3] += 0.5f;
    buffer<float>(g, 0)[tid] = b.a[3] * 100 + c.a[3] + spoil(b) * 1000 + b.c + b.a[3];
    """
    (out,), _ = launched(kernel(body, before=helper), np.zeros(8, np.float32), threads=8)
    assert out.tolist() == [tid * 1102 + 0.5 + ord("q") for tid in range(8)]


def test_program_variables_are_initialised_before_the_dispatch():
    before = "static int twice(int x) { return x * 2; }\nstatic const __global int start = twice(21);"
    (out,), _ = launched(
        kernel("buffer<int>(g, 0)[tid] = start;", before=before), np.zeros(2, np.int32), threads=2
    )
    assert out.tolist() == [42, 42]


def test_atomics_return_what_was_there(rng):
    body = """
    device uint* c = buffer<uint>(g, 1);
    out[tid] = __atomic_fetch_add(c, 3, __ATOMIC_RELAXED);
    __atomic_fetch_max(c + 1, tid * 7 % 32, __ATOMIC_RELAXED);
    __atomic_fetch_and(c + 2, ~(1u << tid), __ATOMIC_RELAXED);
    uint old = __atomic_load_n(c + 3, __ATOMIC_RELAXED), tries = 0;
    while (!__atomic_compare_exchange_n(c + 3, &old, old * 3 + 1, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ++tries;
    __atomic_fetch_add(buffer<float>(g, 2), 0.5f, __ATOMIC_RELAXED);
    __atomic_fetch_min((device int*)c + 4, (int)tid - 20, __ATOMIC_RELAXED);
    """
    module = kernel(f"device uint* out = buffer<uint>(g, 0);\n{body}")
    counters = np.array([0, 0, EVERYONE, 1, 5], np.uint32)
    (out, c, f), _ = launched(module, np.zeros(32, np.uint32), counters, np.zeros(1, np.float32))
    assert sorted(out.tolist()) == [3 * i for i in range(32)]
    chain = 1
    for _ in range(32):
        chain = (chain * 3 + 1) & EVERYONE
    assert c.tolist() == [96, 31, 0, chain, (-20) & EVERYONE] and f[0] == 16


# ---- ends ------------------------------------------------------------------------------------------------


def test_an_endless_loop_ends_at_the_step_limit():
    with pytest.raises(StepLimitError, match="body:2"):
        launched(
            kernel("if (tid == 1)\n  while (true) buffer<uint>(g, 0)[0] += 1;"), BYTES, step_limit=100_000
        )


def test_recursion_has_an_end():
    helper = "static uint deep(uint n) { return n ? deep(n - 1) + 1 : 0; }"
    assert words("out[tid] = deep(100);", 1, before=helper) == [100]
    with pytest.raises(RecursionLimitError, match="nested too deep"):
        words("out[tid] = deep(100000);", 1, before=helper)


def test_a_trap_names_thread_and_line():
    with pytest.raises(Trap, match=r"thread \(3, 0, 0\).*body:2"):
        launched(kernel("if (tid == 3)\n  __builtin_trap();"))


def test_what_the_program_does_not_define_is_refused_before_it_runs():
    before = 'extern "C" void elsewhere();'
    with pytest.raises(Unmodelled, match=r"a call of elsewhere.*body:1"):
        launched(kernel("if (tid > 1000) elsewhere();", before=before))


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("x / (x - x)", "division by zero"),
        ("x % (x - x)", "division by zero"),
        ("(int)0x80000000 / -(int)x", "range"),
        ("(int)(x * 1e20f)", "range"),
        ("(uint)(x * -2.0f)", "range"),
    ],
)
def test_what_is_undefined_gives_zero_and_is_reported(expression, what):
    module = kernel(f"device uint* out = buffer<uint>(g, 0); uint x = out[0];\nout[1] = {expression};")
    (out,), outcome = launched(module, np.array([1, 9], np.uint32), threads=1)
    assert out[1] == 0
    assert [(what in r.what, r.location and r.location.line) for r in outcome.reports] == [(True, 2)]
