"""Traces of the o1 system: clean runs do not deviate, planted mistakes are found where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lab
import lab.o1
from tests.systems.planting import planted, remember_reference

# Windows that differ, a ring that wraps, all three paths; head 1 has no far field (its denominator is 0).
SIZES = lab.o1.Sizes(ng=2, hpg=2, d=128, w=40, ns=3, m=5, windows=(0, 33))
CHUNKS = [20, 33, 30, 25, 1, 1, 1, 20, 24]
PATHS = ["chunk", "chunk", "matmul", "matmul", "token", "token", "token", "chunk", "matmul"]
HOW: dict[str, Any] = {"chunks": CHUNKS, "path": PATHS}
Layer = tuple[lab.o1.State, Any, Any, Any]


def layer(seed: int) -> Layer:
    state, q, k, v = lab.o1.example(SIZES, sum(CHUNKS), seed)
    mu = np.asarray(state.mu).copy()
    mu[1] = 0.0
    landmarks = {name: state.arrays[name] for name in ("k_tilde", "q_tilde", "sink_k", "sink_v")}
    return lab.o1.State.fresh(SIZES, mu=mu, **landmarks), q, k, v


@pytest.fixture(scope="module")
def clean() -> tuple[Layer, lab.systems.Trace]:
    """A run of the shipped kernels, whose reference also serves the runs with mistakes."""
    given = layer(4)
    trace = lab.o1.session().trace(*given, **HOW)
    remember_reference(trace)
    return given, trace


SLOT = "{ return (head + x) % window; }"
WINDOW = "ring.window = at[3] > 0 ? at[3] : u.w;"
FIRST = "{ return window - len; }"
VISIBLE = "return min(window, len + i + 1);"
EVICTED = "return len + rows > window ? len + rows - window : 0;"

# Kernel, what stands in its text or in what it includes, and what somebody might have written instead.
MISTAKES = [
    ("o1c_far_e", SLOT, "{ return (head + x) % 40; }", "ring index modulo w, not the group's window"),
    ("o1c_far_e", WINDOW, "ring.window = u.w;", "the group's own window overlooked"),
    ("o1c_far_e", FIRST, "{ return window - len + 1; }", "j0 off by one"),
    ("o1c_far_e", "float top = before;", "float top = -INFINITY;", "the stored maximum forgotten"),
    ("o1c_far_e", "u.m + b] * r;", "u.m + b];", "the stored mass not rescaled"),
    ("o1c_score", VISIBLE, "return min(window, len + i);", "a row that does not see itself"),
    ("o1c_score", "+ column) * u.hpg;", "+ column) * u.hpg + u.hpg;", "columns one further"),
    ("o1c_land", "(u.r0 + i) * u.nh", "i * u.nh", "the first row of the chunk forgotten"),
    ("o1c_max", "largest = simd_max(largest);", "", "a missing maximum across the simdgroup"),
    ("o1c_max", "uint c = lane;", "uint c = lane + 1;", "the first column skipped"),
    ("o1c_far", "mixing[a * u.m + b]", "mixing[b * u.m + a]", "landmark indices swapped"),
    ("o1c_far", "gain[b] * s[rescale_at(u, first + b)]", "gain[b]", "gains not rescaled"),
    ("o1c_far", "s[mass_at(u, first + b, i)]", "s[mass_at(u, first + b, u.k - 1)]", "mass of a later row"),
    ("o1c_far", "j <= i; j++", "j < i; j++", "the row's own eviction left out"),
    ("o1c_far", "denominator >= 0.0f", "denominator > 0.0f", "a denominator of zero does not count"),
    ("o1c_far", "float c = nm[row];", "float c = -INFINITY;", "the near maximum left out"),
    ("o1c_soft", "exp(at[c * u.hpg] - far.x)", "exp(at[c * u.hpg])", "exponentials not rescaled"),
    ("o1c_soft", "max(sum + far.y, LEAST_SUM)", "max(sum, LEAST_SUM)", "the far denominator left out"),
    ("o1c_sum", "(columns + PIECES - 1) / PIECES", "columns / PIECES", "the last columns in no piece"),
    ("o1c_sum", "slot + 1 < ring.window", "slot + 1 < u.w", "the ring wraps at w"),
    ("o1c_add", "t_hat[(gh * u.m + b)", "t_hat[(gh / u.hpg * u.m + b)", "numerators by group, not by head"),
    ("o1c_add", "ring.slot(j - j0)", "ring.slot(j)", "evicted values from the wrong slot"),
    ("o1c_far_commit", " * s[rescale_at(u, t)]", "", "numerators not rescaled"),
    ("o1c_far_commit", "ring.slot(j - j0)", "ring.slot(j)", "evicted values from the wrong slot"),
    ("o1c_ring_commit", "ring.slot(ring.len + j)", "ring.slot(j)", "written from the oldest slot on"),
    ("o1c_meta", "at[2] = ring.far + evicted;", "at[2] = evicted;", "the far count starts anew"),
    ("o1c_meta", "at[1] = ring.slot(evicted);", "at[1] = ring.head + evicted;", "head not taken modulo"),
    ("o1c_gather", "ring, u, ring_v, v)[x]", "ring, u, ring_k, v)[x]", "keys in the value panel"),
    ("o1c_gmax", "u.ns + ring.len + i + 1", "u.ns + ring.len + i", "the row itself left out"),
    ("o1c_gsoft", "c < end", "c <= end", "the next row seen"),
    ("o1c_gadd", "sum * inv[row]", "sum", "not divided by the sum"),
    ("o1c_tok_near", "fma(sum[h], keep, weight)", "sum[h] + weight", "the running sum not rescaled"),
    ("o1c_tok_near", "c += STRIPES", "c += SPLITS", "wrong stride of the stripes"),
    ("o1c_tok_far", "mu[(gh * u.m + a) * u.m + lane]", "mu[(gh * u.m + lane) * u.m + a]", "mu transposed"),
    ("o1c_tok_far", "gain * r;", "gain;", "gains not rescaled"),
    ("o1c_tok_merge", "fma(weight, stripe[PART_SUM], sum)", "sum + stripe[PART_SUM]", "sums not rescaled"),
    ("o1c_tok_commit", " * s[rescale_at(u, t)]", "", "numerators not rescaled"),
    ("o1c_tok_commit", "ring.slot(ring.len)", "ring.slot(0) + 1", "written beside the oldest slot"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "right", "wrong"),
    [m[:3] for m in MISTAKES],
    ids=[f"{kernel}: {what}" for kernel, _, _, what in MISTAKES],
)
def test_a_mistake_is_found_at_the_dispatch_that_has_it(
    clean: tuple[Layer, lab.systems.Trace], kernel: str, right: str, wrong: str
) -> None:
    given, reference = clean
    session = lab.o1.session()
    text = session.source(kernel)
    session.replace(planted(kernel, text, right, wrong), names=kernel)
    trace = session.trace(*given, **HOW)
    trace.reference = lambda of, chunk: reference.expected_of(chunk)
    found = trace.first_deviation()
    assert found is not None
    assert found.kernel == kernel
    assert trace[found.step].replaced
    print(found)


def test_the_shipped_kernels_do_not_deviate(clean: tuple[Layer, lab.systems.Trace]) -> None:
    _, trace = clean
    assert trace.first_deviation() is None
    kernels = {d.kernel for d in trace.deviations}
    assert kernels == {d.kernel for path in lab.o1.PATHS for d in lab.o1.plan(SIZES, path, 1).dispatches}
    # What the tolerances leave out is little: they are a few times what rounding comes to.
    assert max(d.roundings / d.tolerance for d in trace.deviations if d.tolerance) > 0.02
    assert max(d.relative for d in trace.deviations) < 2e-6


@pytest.mark.parametrize("number", range(3))
def test_random_layers_do_not_deviate(seed: int, number: int) -> None:
    rng = np.random.default_rng(seed + number)
    w = int(rng.integers(4, 20))
    sizes = lab.o1.Sizes(
        ng=2,
        hpg=int(rng.integers(1, 5)),
        d=int(rng.choice([128, 256])),
        w=w,
        ns=int(rng.integers(0, 4)),
        m=int(rng.integers(1, 33)),
        windows=(0, int(rng.integers(1, w + 1))),
    )
    chunks = [1, 1, 1, *rng.integers(1, sizes.longest_chunk + 1, 7).tolist(), 1, 1]
    path = ["token"] * 2 + [str(p) for p in rng.choice(["chunk", "matmul"], 8)] + ["token"] * 2
    state, q, k, v = lab.o1.example(sizes, sum(chunks), seed)
    print(sizes, chunks, path)
    assert lab.o1.trace(state, q, k, v, chunks=chunks, path=path).first_deviation() is None


def test_a_sealed_layer_with_a_signed_mixing_matrix_does_not_deviate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = lab.o1.Sizes(ng=2, hpg=2, d=32, w=12, ns=2, m=6)
    prefix = rng.standard_normal((20, 2, 32)), rng.standard_normal((20, 4, 32))
    sinks = rng.standard_normal((2, 2, 2, 32))
    state = lab.o1.seal(sizes, *prefix, *sinks)
    assert (np.asarray(state.mu) < 0).any()
    _, q, k, v = lab.o1.example(sizes, 60, seed)
    for path in ("chunk", "matmul"):
        assert lab.o1.trace(state, q, k, v, chunks=10, path=path).first_deviation() is None


def test_a_trace_ends_as_a_run_does_bit_for_bit(clean: tuple[Layer, lab.systems.Trace]) -> None:
    (state, *rows), trace = clean
    assert state.tokens == 0, "tracing leaves the state alone"
    again = state.copy()
    out = lab.o1.session().run(again, *rows, **HOW)
    end = trace.buffers_at(len(trace))
    np.testing.assert_array_equal(end["out"], out)
    for name, array in again.arrays.items():
        np.testing.assert_array_equal(end[name], array)


def test_a_layer_can_go_on_from_any_chunk_of_a_trace(clean: tuple[Layer, lab.systems.Trace]) -> None:
    (_, *rows), trace = clean
    chunk = 4
    back = trace.buffers_at(trace.chunks[chunk].first_step)
    state = lab.o1.State(SIZES, back)
    start = sum(CHUNKS[:chunk])
    rest = [x[start:] for x in rows]
    out = lab.o1.session().run(state, *rest, chunks=CHUNKS[chunk:], path=PATHS[chunk:])
    np.testing.assert_array_equal(out, trace.buffers_at(len(trace))["out"][start:])


def test_a_trace_may_begin_in_the_middle_of_a_sequence(seed: int) -> None:
    state, q, k, v = layer(seed)
    lab.o1.run(state, q[:70], k[:70], v[:70])
    trace = lab.o1.trace(state, q[70:120], k[70:120], v[70:120], chunks=25)
    assert trace.first_deviation() is None and trace.deviations


def test_without_known_tokens_nothing_is_compared() -> None:
    state, q, k, v = layer(1)
    trace = lab.o1.trace(lab.o1.State(SIZES, state.arrays), q[:9], k[:9], v[:9])
    assert trace.deviations == [] and len(trace) == 11


def test_changes_are_shown_where_they_are(clean: tuple[Layer, lab.systems.Trace]) -> None:
    _, trace = clean
    commit = next(s for s in trace if s.kernel == "o1c_ring_commit" and s.chunk == 1)
    assert commit.written == ("ring_k", "ring_v")
    changed = commit.changed("ring_k")
    # Chunk 1 brings 33 rows after 20: slots 20..39 and 0..12 of 40, slots 20..32 and 0..19 of 33.
    assert changed.any(-1)[0].nonzero()[0].tolist() == [*range(13), *range(20, 40)]
    assert changed.any(-1)[1].nonzero()[0].tolist() == [*range(33)]
    add = next(s for s in trace if s.kernel == "o1c_add" and s.chunk == 1)
    assert add.changed("out").any((-1, -2)).nonzero()[0].tolist() == [*range(20, 53)]
    assert not add.changed("ring_k").any()


def test_elements_are_named_in_the_systems_terms(clean: tuple[Layer, lab.systems.Trace]) -> None:
    _, trace = clean

    def told(kernel: str, chunk: int, buffer: str, *index: int) -> tuple[str, str]:
        step = next(s for s in trace if s.kernel == kernel and s.chunk == chunk)
        return step.describe(buffer, index)

    # Chunk 1 has len 20, head 0. Row 30 of group 1, window 33, evicts 18: it sees slot 18 first.
    assert told("o1c_score", 1, "sc", 30, 1, 2, 1) == ("", "row 30, group 1, column 2, head 1 (sink 2)")
    assert told("o1c_score", 1, "sc", 30, 1, 4, 0)[1].endswith("(ring slot 19)")
    assert told("o1c_score", 1, "sc", 30, 1, 5, 0)[1].endswith("(chunk row 0)")
    # Chunk 2, by matrix products: group 1 has len 33 and head 20, so column 3 is slot 20.
    assert told("matmul_scores", 2, "sc", 3, 7, 4)[1] == "group 1, head 1, row 7, column 4 (ring slot 21)"
    assert told("o1c_gather", 2, "kp", 1, 40, 0)[1].endswith("(chunk row 4)")
    assert told("o1c_gather", 2, "kp", 1, 72, 0)[1].endswith("(empty)")
    assert told("o1c_ring_commit", 1, "ring_k", 0, 25, 3) == (
        "",
        "group 0, slot 25, dimension 3 (of chunk row 5)",
    )
    plane = SIZES.ghm * 64
    assert told("o1c_far_e", 1, "s", plane + 64 * 13 + 9) == ("zc", "group 1, head 0, landmark 3, row 9")
    assert told("o1c_far_e", 1, "s", 2 * plane + 13) == ("M'", "group 1, head 0, landmark 3")
    assert told("o1c_far_commit", 1, "mz", 3, 7) == ("z", "group 1, head 1, landmark 2")
    assert told("o1c_far", 1, "hd", 5, 2, 1) == ("far denominator", "row 5, group 1, head 0")
    assert told("o1c_tok_near", 4, "part", 1, 3, 7, 0, 2)[0] == ""  # an unwritten word
    assert told("o1c_tok_near", 4, "part", 1, 3, 7, 0, 6) == (
        "values",
        "group 1, split 3, stripe 7, head 0, dimension 2",
    )
    assert told("o1c_tok_far", 4, "fo", 3, 6) == ("gains", "group 1, head 1, landmark 2")
    assert told("o1c_meta", 1, "meta", 1, 2) == ("far", "group 1")


def test_a_trace_is_cheap_where_little_changes() -> None:
    sizes = lab.o1.Sizes(ng=2, hpg=1, d=128, w=2048, ns=0, m=2)
    state, q, k, v = lab.o1.example(sizes, 40)
    trace = lab.o1.trace(state, q, k, v, path="token")
    rings = 2 * state.ring_k.nbytes
    assert trace.nbytes < 1.5 * rings, "40 tokens change a slot of a group each"


def test_a_saved_trace_has_its_reference_again(seed: int, tmp_path: Path) -> None:
    state, q, k, v = layer(seed)
    lab.o1.run(state, q[:50], k[:50], v[:50])
    trace = lab.o1.trace(state, q[50:90], k[50:90], v[50:90], chunks=20)
    again = lab.o1.load_trace(trace.save(tmp_path))
    assert again.deviations == trace.deviations and again.about["sizes"]["w"] == SIZES.w
    for old, new in zip(trace, again, strict=True):
        for buffer in old.dispatch.writes:
            np.testing.assert_array_equal(new.expected(buffer).values, old.expected(buffer).values)
    assert again[9].describe("ring_k", (0, 5, 0)) == trace[9].describe("ring_k", (0, 5, 0))
