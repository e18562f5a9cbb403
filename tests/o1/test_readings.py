"""What is read from a trace at each position: shares, gains, masses, rings; and from what broken kernels
wrote."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import lab
import lab.o1
from lab.o1 import readings, reference

# Windows that differ, a ring that wraps, all three paths; head 1 has no far field (its denominator is 0).
SIZES = lab.o1.Sizes(ng=2, hpg=2, d=128, w=40, ns=3, m=5, windows=(0, 33))
CHUNKS = [20, 33, 30, 25, 1, 1, 1, 20, 24]
PATHS = ["chunk", "chunk", "matmul", "matmul", "token", "token", "token", "chunk", "matmul"]
HOW: dict[str, Any] = {"chunks": CHUNKS, "path": PATHS}
ROWS = sum(CHUNKS)
# After how many dispatches of a chunk weights are there.
WEIGHTS = {"chunk": 6, "matmul": 7, "token": 2}


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    """Numbers that are none are no news to a reader of traces."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def layer(seed: int, sizes: lab.o1.Sizes = SIZES, rows: int = ROWS) -> tuple[Any, ...]:
    state, q, k, v = lab.o1.example(sizes, rows, seed)
    mu = np.asarray(state.mu).copy()
    mu[1] = 0.0
    landmarks = {name: state.arrays[name] for name in ("k_tilde", "q_tilde", "sink_k", "sink_v")}
    return lab.o1.State.fresh(sizes, mu=mu, **landmarks), q, k, v


@pytest.fixture(scope="module")
def trace() -> lab.systems.Trace:
    return lab.o1.session().trace(*layer(4), **HOW)


def everything(trace: lab.systems.Trace, position: int, row: int, head: int) -> tuple[Any, ...]:
    rings = readings.rings(trace, position)
    weights = readings.weights(trace, position, row, head)
    return (
        weights,
        weights.split(),
        weights.split("reference"),
        readings.gains(trace, position, head),
        readings.masses(trace, position, head),
        readings.flow(trace, position, head),
        [(r.next_slot, r.logical, r.ages, r.age(0), readings.meta_words(r)) for r in rings],
        readings.invariants(trace, position),
        readings.distances(trace, position),
        readings.position_of(trace, row),
    )


# ---- kernels that are right ----------------------------------------------------------------------------


@pytest.mark.parametrize("head", range(4))
def test_shares_are_those_of_the_definition_on_every_path(seed: int, head: int) -> None:
    trace = lab.o1.session().trace(*layer(seed), **HOW)
    for row in range(ROWS):
        weights = readings.weights(trace, len(trace), row, head)
        np.testing.assert_allclose(weights.kernel, weights.reference, atol=2e-6)
        np.testing.assert_allclose(weights.kernel.sum(), 1, atol=2e-6)
        np.testing.assert_allclose(weights.reference.sum(), 1, atol=1e-12)
        assert (weights.row, weights.head) == (row, head)
        assert len(weights.columns) == len(weights.parts) == len(weights.kernel)
        far = max(0, row + 1 - SIZES.window(head // 2))
        assert (weights.reference[-1] > 0) == (far > 0 and head != 1)
        for side in ("kernel", "reference"):
            np.testing.assert_allclose(weights.split(side).sum(), 1, atol=2e-6)


def test_the_reference_s_shares_make_the_definition_s_output(seed: int) -> None:
    state, q, k, v = layer(seed)
    trace = lab.o1.session().trace(state, q, k, v, **HOW)
    expected = reference.attention(state.history, *map(np.asarray, (q, k, v)))
    values, scale = np.asarray(v, float)[:, 0], state.history.scale
    for row in (0, 39, 41, 120):
        weights = readings.weights(trace, 0, row, 0)
        exponents = scale * np.asarray(k, float)[:, 0] @ np.asarray(state.q_tilde, float)[0].T
        landmarks = np.exp(scale * np.asarray(state.k_tilde, float)[0] @ np.asarray(q, float)[row, 0])
        gone = max(0, row + 1 - 40)
        far = np.exp(exponents[:gone]) @ (landmarks @ np.asarray(state.mu, float)[0])
        far *= weights.reference[-1] / far.sum() if gone else 0.0
        near = np.concatenate([np.asarray(state.sink_v, float)[0], values[gone : row + 1]])
        out = weights.reference[:-1] @ near + far @ values[:gone]
        np.testing.assert_allclose(out, expected[row, 0], atol=1e-12)


def test_shares_and_gains_are_what_the_reference_expects_in_the_buffers(trace: lab.systems.Trace) -> None:
    expected = trace.expected_of(7)  # rows 111 to 130, on the chunk path
    for row, head in ((111, 0), (120, 2), (130, 3)):
        i, n = row - 111, 3 + SIZES.window(head // 2)
        inverse = expected["o1c_soft"]["inv"].values[i, head]
        near = expected["o1c_soft"]["sc"].values[i, head // 2, :n, head % 2] * inverse
        far = expected["o1c_far"]["hd"].values[i, head, 1] * inverse
        weights = readings.weights(trace, 0, row, head)
        np.testing.assert_allclose(weights.reference, np.append(near, far), rtol=1e-11)
    gains = readings.gains(trace, trace.chunks[7].first_step + 1, 2)
    gn, r = expected["o1c_far"]["gn"].values[:, 2], expected["o1c_far_e"]["s"].values[-20:].reshape(4, 5)[2]
    zc = expected["o1c_far_e"]["s"].values[64 * 20 : 128 * 20].reshape(4, 5, 64)[2, :, :20]
    inverse = expected["o1c_soft"]["inv"].values[:, 2, None]
    np.testing.assert_allclose(gains.reference, gn / r * zc.T * inverse, rtol=1e-11)


def test_columns_say_what_they_are(trace: lab.systems.Trace) -> None:
    # Chunk 1 has rows 20 to 52. Group 1 keeps 33 tokens, so row 35 sees token 3 first.
    weights = readings.weights(trace, len(trace), 35, 2)
    assert weights.columns[:5] == ("sink 0", "sink 1", "sink 2", "token 3, slot 3", "token 4, slot 4")
    assert weights.columns[19:21] == ("token 19, slot 19", "row 0 of the chunk, token 20")
    assert weights.columns[-2:] == ("row 15 of the chunk, token 35", "far field")
    assert weights.parts.dtype == np.uint8 and weights.parts.tolist() == [0] * 3 + [1] * 17 + [2] * 16 + [3]
    # Token 101 lies in slot 21 of 40 and in slot 2 of 33.
    for head, slot in ((1, 21), (3, 2)):
        assert f"token 101, slot {slot}" in readings.weights(trace, 0, 120, head).columns


def test_texts_of_tokens_are_told_where_the_trace_has_them(seed: int) -> None:
    sizes = lab.o1.Sizes(ng=1, hpg=1, d=8, w=4, ns=0, m=2)
    trace = lab.o1.session().trace(*lab.o1.example(sizes, 6, seed), chunks=2)
    trace.about["tokens"] = ["down", "the", "rabbit", "hole", ",", "she"]
    weights = readings.weights(trace, 0, 4, 0)
    assert weights.columns[0] == "token 1 ‘the’, slot 1"
    assert weights.columns[-2] == "row 0 of the chunk, token 4 ‘,’"
    (ring,) = readings.rings(trace, len(trace))
    assert ring.texts == (",", "she", "rabbit", "hole")


def test_what_is_not_written_yet_is_nan_at_every_position(trace: lab.systems.Trace) -> None:
    for number, chunk in enumerate(trace.chunks):
        first, plan = chunk.first_step, chunk.plan
        row, ready = plan.first + plan.rows // 2, first + WEIGHTS[plan.path]
        last = readings.weights(trace, len(trace), row, 3)
        for position in {0, first, *range(ready - 1, first + len(plan.dispatches) + 1), len(trace)}:
            weights = readings.weights(trace, position, row, 3)
            assert np.isnan(weights.kernel).all() == (position < ready)
            np.testing.assert_array_equal(weights.reference, last.reference)
            if position >= ready:
                np.testing.assert_array_equal(weights.kernel, last.kernel)
            gains = readings.gains(trace, position, 3)
            if first < position <= first + len(plan.dispatches):
                assert gains.first == plan.first and len(gains.kernel) == plan.rows
                assert np.isnan(gains.far_share_kernel).all() == (position < ready)
                assert not np.isnan(gains.far_share_reference).any()
            elif position == first and number:
                assert gains.first == trace.chunks[number - 1].plan.first


def test_gains_add_up_to_the_far_share_and_agree_with_the_reference(seed: int) -> None:
    trace = lab.o1.session().trace(*layer(seed), **HOW)
    for chunk in trace.chunks:
        position = chunk.first_step + len(chunk.plan.dispatches)
        for head in range(4):
            gains = readings.gains(trace, position, head)
            any_far = gains.first + np.arange(len(gains.kernel)) >= SIZES.window(head // 2)
            for values, share in (
                (gains.kernel, gains.far_share_kernel),
                (gains.reference, gains.far_share_reference),
            ):
                assert (np.isnan(values).all(1) == ~any_far).all() and not np.isnan(values[any_far]).any()
                np.testing.assert_allclose(np.nansum(values, 1), share, atol=2e-6)
            np.testing.assert_allclose(gains.kernel, gains.reference, atol=2e-6)
            if head == 1:
                assert not gains.far_share_kernel.any()


def test_masses_agree_with_the_reference_after_each_chunk(trace: lab.systems.Trace) -> None:
    ends = np.cumsum(CHUNKS)
    for position in range(len(trace) + 1):
        masses = readings.masses(trace, position, 2)
        committed = [s for s in trace[:position] if "mz" in s.dispatch.writes]
        assert masses.rows.tolist() == ends[: len(committed)].tolist()
        assert masses.maxima.shape == masses.reference_masses.shape == (len(committed), 5)
    np.testing.assert_allclose(masses.maxima, masses.reference_maxima, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(masses.masses, masses.reference_masses, rtol=1e-5)
    assert np.isneginf(masses.maxima[0]).all() and not masses.masses[0].any()
    assert (masses.masses[1:] >= 1).all()


def test_evicted_tokens_flow_into_the_masses(trace: lab.systems.Trace) -> None:
    chunk = trace.chunks[1]  # rows 20 to 52: 13 leave the ring of 40 slots, 20 that of 33
    for head, leaving in ((0, 13), (3, 20)):
        before = readings.flow(trace, chunk.first_step + 1, head)
        assert before.tokens.tolist() == before.slots.tolist() == [*range(leaving)]
        assert np.isneginf(before.maxima).all() and not before.masses.any() and not before.committed
        after = readings.flow(trace, chunk.first_step + 9, head)
        assert after.committed and after.weights.shape == (leaving, 5)
        np.testing.assert_allclose(
            after.masses * after.rescale + after.weights.sum(0), after.after, rtol=1e-5
        )
        np.testing.assert_array_equal(after.after, readings.masses(trace, len(trace), head).masses[1])
        np.testing.assert_array_equal(after.maxima_after, readings.masses(trace, len(trace), head).maxima[1])
    token = trace.chunks[5].first_step  # of row 109
    nothing = readings.flow(trace, token + 1, 3)
    assert nothing.tokens.tolist() == [76] and nothing.slots.tolist() == [76 % 33]
    assert np.isnan(nothing.weights).all() and np.isnan(nothing.after).all()
    there = readings.flow(trace, token + 2, 3)
    np.testing.assert_allclose(there.masses * there.rescale + there.weights[0], there.after, rtol=1e-6)
    assert not there.committed and readings.flow(trace, token + 4, 3).committed


def test_the_ring_is_what_one_who_pushes_token_by_token_has(trace: lab.systems.Trace) -> None:
    for number, chunk in enumerate(trace.chunks):
        plan, names = chunk.plan, [d.kernel for d in chunk.plan.dispatches]
        ring_commit = next(n for n, d in enumerate(plan.dispatches) if "ring_k" in d.writes)
        meta = len(names) - 1
        for done in range(len(names) + 1):
            position = chunk.first_step + done
            if not done and number:
                continue  # the chunk before is the one that is looked at
            for group, ring in enumerate(readings.rings(trace, position)):
                window = SIZES.window(group)
                pushed = plan.first + (plan.rows if done > ring_commit else 0)
                slots = np.full(40, -1)
                for token in range(pushed):
                    slots[token % window] = token
                assert ring.tokens.tolist() == slots.tolist()
                known = plan.first + (plan.rows if done > meta else 0)
                far = max(0, known - window)
                assert (ring.length, ring.far, ring.head) == (known - far, far, far % window)
                assert (ring.window, ring.slots, ring.next_slot) == (window, 40, known % window)
                assert ring.logical.tolist() == [t % window for t in range(far, known)]
                gone = [*range(max(0, plan.first - window), max(0, plan.first + plan.rows - window))]
                new = [*range(plan.first, plan.first + plan.rows)]
                if done > ring_commit:
                    assert ring.written.tolist() == sorted(t % window for t in new)
                    assert ring.evicted.tolist() == gone and not ring.leaving.size
                    assert ring.evicted_slots.tolist() == [t % window for t in gone]
                    assert not ring.entering.size
                else:
                    assert not ring.written.size and not ring.evicted.size
                    assert ring.leaving.tolist() == (gone if done else [])
                    assert ring.entering.tolist() == (new if done else [])
            assert readings.invariants(trace, position) == ()
    first, second = readings.rings(trace, len(trace))
    assert first.age((ROWS - 1) % 40) == 0 and first.age(ROWS % 40) == 39 and second.age(39) == -1
    assert first.ages.max() == 39 and second.ages.max() == 32


def test_meta_is_told_in_words(trace: lab.systems.Trace) -> None:
    at_start, at_end = (readings.rings(trace, position)[1] for position in (0, len(trace)))
    assert readings.meta_words(at_start) == (
        "0 of 33 slots of w = 40 filled; the next token goes into slot 0; 0 tokens have left for the far "
        "field."
    )
    assert readings.meta_words(at_end) == (
        "33 of 33 slots of w = 40 filled, the oldest token in slot 23; the next token goes into slot 23; "
        "122 tokens have left for the far field."
    )


def test_distances_from_exact_attention_begin_with_the_first_eviction(trace: lab.systems.Trace) -> None:
    errors = readings.distances(trace, len(trace))
    assert errors.shape == (ROWS, 4)
    assert errors[:33].max() < 1e-5 and errors[33:40, :2].max() < 1e-5
    assert errors[33:, 2:].min() > 1e-3 and errors[40:, :2].min() > 1e-3
    half = readings.distances(trace, trace.chunks[2].first_step)
    np.testing.assert_array_equal(half[:53], errors[:53])
    assert np.isnan(half[53:]).all() and np.isnan(readings.distances(trace, 0)).all()


def test_a_sealed_layer_s_negative_parts_are_told(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = lab.o1.Sizes(ng=2, hpg=2, d=32, w=12, ns=2, m=6)
    prefix = rng.standard_normal((20, 2, 32)), rng.standard_normal((20, 4, 32))
    state = lab.o1.seal(sizes, *prefix, *rng.standard_normal((2, 2, 2, 32)))
    _, q, k, v = lab.o1.example(sizes, 60, seed)
    trace = lab.o1.session().trace(state, q, k, v, chunks=10)
    parts = []
    for chunk in range(2, 6):
        gains = readings.gains(trace, 11 * (chunk + 1), 3)
        undecided = np.abs(gains.far_share_reference) < 1e-3
        near = np.abs(gains.reference).max(1) < 100  # shares of a denominator that nearly cancels
        kept = ~undecided & near & (gains.far_share_kernel != 0)
        np.testing.assert_allclose(gains.kernel[kept], gains.reference[kept], atol=1e-2)
        parts.append(gains.reference)
    assert (np.concatenate(parts) < 0).any()


# ---- where a trace begins ------------------------------------------------------------------------------


def test_a_trace_may_begin_in_the_middle_of_a_sequence(seed: int) -> None:
    state, q, k, v = layer(seed)
    lab.o1.run(state, q[:70], k[:70], v[:70])
    trace = lab.o1.trace(state, q[70:120], k[70:120], v[70:120], chunks=25)
    first = readings.rings(trace, 0)
    assert [r.far for r in first] == [30, 37]
    assert first[1].tokens[:33].tolist() == [*range(66, 70), *range(37, 66)]
    for position in range(len(trace) + 1):
        assert readings.invariants(trace, position) == ()
        for row in (0, 24, 25, 49):
            weights = readings.weights(trace, position, row, 2)
            done = position >= 11 * (row // 25) + WEIGHTS["chunk"]
            assert np.isnan(weights.kernel).all() == (not done)
            if done:
                np.testing.assert_allclose(weights.kernel, weights.reference, atol=2e-6)
    assert readings.weights(trace, 0, 0, 0).columns[3] == "token 31, slot 31"
    masses = readings.masses(trace, len(trace), 2)
    assert masses.rows.tolist() == [95, 120]
    np.testing.assert_allclose(masses.masses, masses.reference_masses, rtol=1e-5)
    assert readings.distances(trace, len(trace)).min() > 1e-3


def test_without_known_tokens_the_kernels_side_is_there(seed: int) -> None:
    state, q, k, v = layer(seed)
    lab.o1.run(state, q[:70], k[:70], v[:70])
    known = lab.o1.trace(state, q[70:73], k[70:73], v[70:73], chunks=[2, 1], path=["chunk", "token"])
    unknown = lab.o1.trace(
        lab.o1.State(SIZES, state.arrays),
        q[70:73],
        k[70:73],
        v[70:73],
        chunks=[2, 1],
        path=["chunk", "token"],
    )
    for position in range(len(unknown) + 1):
        for row in range(3):
            ours, theirs = (readings.weights(t, position, row, 3) for t in (unknown, known))
            np.testing.assert_array_equal(ours.kernel, theirs.kernel)
            assert ours.columns == theirs.columns and np.isnan(ours.reference).all()
        for ours, theirs in zip(
            readings.rings(unknown, position), readings.rings(known, position), strict=True
        ):
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_array_equal(ours.written, theirs.written)
            np.testing.assert_array_equal(ours.evicted, theirs.evicted)
        assert readings.invariants(unknown, position) == ()
    gains, masses = (f(unknown, len(unknown), 3) for f in (readings.gains, readings.masses))
    assert np.isnan(gains.reference).all() and not np.isnan(gains.kernel).any()
    assert np.isnan(masses.reference_masses).all() and masses.rows.tolist() == [72, 73]
    assert np.isnan(readings.distances(unknown, len(unknown))).all()


def test_a_ring_that_does_not_begin_at_slot_0_is_read_as_it_is(seed: int) -> None:
    """Another engine may hand its slots out from anywhere."""
    state, q, k, v = layer(seed)
    lab.o1.run(state, q[:50], k[:50], v[:50])
    arrays = {name: np.array(array) for name, array in state.arrays.items()}
    for name in ("ring_k", "ring_v"):
        arrays[name][0] = np.roll(arrays[name][0], 7, axis=0)
    arrays["meta"][0, 1] = (arrays["meta"][0, 1] + 7) % 40
    trace = lab.o1.trace(lab.o1.State(SIZES, arrays), q[50:55], k[50:55], v[50:55], chunks=5)
    assert readings.rings(trace, 0)[0].tokens[17] == 10 and readings.invariants(trace, 0) == ()
    ring = readings.rings(trace, len(trace))[0]
    assert ring.tokens[ring.logical].tolist() == [*range(15, 55)]
    assert ring.evicted_slots.tolist() == ring.written.tolist() == [*range(17, 22)]
    assert readings.invariants(trace, len(trace)) == ()


def test_a_saved_trace_reads_the_same(trace: lab.systems.Trace, tmp_path: Path) -> None:
    short = lab.o1.session().trace(*layer(4), **HOW)
    again = lab.o1.load_trace(short.save(tmp_path))
    for row, head in ((5, 0), (60, 3), (109, 2), (150, 0)):
        ours, theirs = (readings.weights(t, len(trace), row, head) for t in (again, trace))
        assert ours.columns == theirs.columns
        np.testing.assert_array_equal(ours.kernel, theirs.kernel)
        np.testing.assert_array_equal(ours.reference, theirs.reference)


def test_a_trace_is_read_while_it_is_recorded(trace: lab.systems.Trace) -> None:
    growing, steps = lab.o1.session().recording(*layer(4), **HOW)
    everything(growing, 0, 150, 2)
    assert readings.gains(growing, 0, 0).kernel.shape == (0, 5)
    assert readings.position_of(growing, 30) == 0
    for step in steps:
        position = step.number + 1
        if step.number % 5:
            continue
        for row in (5, 60, 150):
            ours, theirs = (readings.weights(t, position, row, 2) for t in (growing, trace))
            np.testing.assert_array_equal(ours.kernel, theirs.kernel)
            np.testing.assert_array_equal(ours.reference, theirs.reference)
        assert readings.position_of(growing, 30) == min(position, 22)
    assert readings.position_of(growing, 30) == 22


@pytest.mark.parametrize(
    ("position", "row", "head", "told"),
    [
        (999, 0, 0, "there is no position 999"),
        (-1, 0, 0, "there is no position -1"),
        (0, ROWS, 0, f"The trace is of {ROWS} rows: there is no row {ROWS}."),
        (0, -1, 0, "there is no row -1"),
        (0, 0, 4, "There are 4 query heads: there is no head 4."),
    ],
)
def test_what_there_is_not_is_refused(
    trace: lab.systems.Trace, position: int, row: int, head: int, told: str
) -> None:
    with pytest.raises(lab.ArgumentError, match=told):
        readings.weights(trace, position, row, head)


# ---- kernels that are not ------------------------------------------------------------------------------


def broken(kernel: str, right: str, wrong: str, seed: int = 4) -> lab.systems.Trace:
    session = lab.o1.session()
    text = session.source(kernel)
    assert right in text, f"{kernel} has no {right!r} any more: plant this mistake anew"
    session.replace(text.replace(right, wrong), names=kernel)
    return session.trace(*layer(seed), **HOW)


def test_a_token_in_the_wrong_slot_is_seen_there() -> None:
    trace = broken("o1c_ring_commit", "ring.slot(ring.len + j)", "(ring.slot(ring.len + j) + 1) % 33")
    end = trace.chunks[0].first_step + 10  # after the ring's commit of rows 0 to 19
    for ring in readings.rings(trace, end):
        assert ring.tokens[:22].tolist() == [-1, *range(20), -1]
        assert ring.written.tolist() == [*range(1, 21)]
    assert readings.invariants(trace, end + 1) == ()


def test_keys_that_are_none_are_seen_as_unknown() -> None:
    trace = broken("o1c_ring_commit", "ring_k[to] = k[from];", "ring_k[to] = 0.5f * k[from];")
    ring = readings.rings(trace, 11)[0]
    assert (ring.tokens[:20] == -2).all() and (ring.tokens[20:] == -1).all()
    assert (ring.ages == -1).all()


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        (
            "at[0] = min(ring.window, ring.len + u.k);",
            "at[0] = ring.len + u.k;",
            "the length 53 is more than its window of 40",
        ),
        (
            "at[1] = ring.slot(evicted);",
            "at[1] = ring.head + evicted + 40;",
            "the head 53 is none of its window of 40 slots.",
        ),
        (
            "at[1] = ring.slot(evicted);",
            "at[1] = ring.head;",
            "the head is slot 0; after 13 evictions it is ",
        ),
        (
            "at[2] = ring.far + evicted;",
            "at[2] = ring.far;",
            "length 40 and far count 0 do not add up to 53 tokens",
        ),
        ("at[2] = ring.far + evicted;", "at[2] = evicted; at[3] = 5;", "the window in meta is 5, and was 0."),
    ],
)
def test_what_must_hold_of_meta_and_does_not_is_told(right: str, wrong: str, told: str) -> None:
    trace = broken("o1c_meta", right, wrong)
    end = trace.chunks[1].first_step + 11
    violated = readings.invariants(trace, end)
    assert any(text.startswith(f"Group 0: {told}") for text in violated), violated
    for position in range(len(trace) + 1):
        everything(trace, position, 80, 3)


def test_a_sum_that_is_wrong_shows_in_the_shares() -> None:
    trace = broken("o1c_soft", "max(sum + far.y, LEAST_SUM)", "max(sum, LEAST_SUM)")
    weights = readings.weights(trace, len(trace), 50, 0)
    assert weights.kernel.sum() > 1.01 and weights.reference.sum() == pytest.approx(1)


def test_a_kernel_that_faults_ends_in_nan() -> None:
    trace = broken("o1c_soft", "inv[i * u.nh + gh] = ", "inv[i * u.nh + gh + 4000000] = ")
    assert trace[len(trace) - 1].fault
    weights = readings.weights(trace, len(trace), 3, 0)
    assert np.isnan(weights.kernel).all() and not np.isnan(weights.reference).any()
    assert np.isnan(readings.gains(trace, len(trace), 0).far_share_kernel).all()
    everything(trace, len(trace), 100, 3)


class Rubbish(lab.o1.Session):
    """A session whose kernels write random bits into all their buffers, or small numbers into meta."""

    def __init__(self, seed: int, *, everywhere: bool, small: bool) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.everywhere, self.small = everywhere, small

    def run_dispatch(self, dispatch: Any, plan: Any, arrays: Any, **how: Any) -> dict[str, mx.array]:
        names = dispatch.buffers if self.everywhere else dispatch.writes
        results = {}
        for name in names:
            if name in dispatch.constants:
                continue
            about = plan.buffers[name]
            bits = self.rng.integers(0, 1 << 32, about.shape, np.uint32)
            if name == "meta" and self.small:
                bits %= 60
            elif self.small:
                bits = self.rng.normal(0, 30, about.shape).astype(np.float32).view(np.uint32)
            results[name] = mx.array(bits.view(about.dtype))
        return results


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_rubbish_gives_nan_and_no_exception(seed: int, everywhere: bool, small: bool) -> None:
    session = Rubbish(seed, everywhere=everywhere, small=small)
    trace = session.trace(*layer(seed), **HOW)
    for position in range(0, len(trace) + 1, 1 if small else 3):
        for row, head in ((0, 0), (55, 1), (108, 2), (109, 3), (ROWS - 1, 3)):
            weights, *_, errors, _ = everything(trace, position, row, head)
            assert not np.isnan(weights.reference).any()
            assert errors.shape == (ROWS, 4)
    unknown = session.trace(lab.o1.State(SIZES, layer(seed)[0].arrays), *layer(seed)[1:], **HOW)
    for position in range(0, len(unknown) + 1, 7):
        everything(unknown, position, 70, 3)


def test_states_of_rubbish_are_read_too(seed: int) -> None:
    """A layer may have been spoilt before the trace began."""
    rng = np.random.default_rng(seed)
    state, q, k, v = layer(seed)
    arrays = {name: np.array(array) for name, array in state.arrays.items()}
    arrays["meta"][:, :3] = rng.integers(0, 1 << 32, (2, 3), np.uint32)
    arrays["ring_k"] = rng.integers(0, 1 << 32, arrays["ring_k"].shape, np.uint32).view(np.float32)
    trace = Rubbish(seed, everywhere=False, small=False).trace(
        lab.o1.State(SIZES, arrays), q[:30], k[:30], v[:30], chunks=15
    )
    for position in range(len(trace) + 1):
        everything(trace, position, 20, 3)
