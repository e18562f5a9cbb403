"""Traces of QSA: clean runs do not deviate, planted mistakes are found where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lab
import lab.qsa
from lab.qsa import Cache, Sizes
from tests.systems.planting import planted, remember_reference

# Chunks of more than a simdgroup's cells and some of a few; calls from below the budget to beyond it.
SIZES = Sizes(qh=24, qkv=2, qbudget=83, qch=40, qch2=8, qhg=2, max_cells=110)
CELLS, TOKENS = 79, 24
PATHS = ["v1", "v2", "v3"] * 4
HOW: dict[str, Any] = {"tokens": 2, "path": PATHS}
Given = tuple[Cache, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def layer(seed: int) -> Given:
    """Many blocks of a few kinds, so that scores are often equal, on both sides of 0; and what 8 bits make
    difficult: scales that differ between groups, a group of zeros, one whose scale is hardly a number."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    def keys_or_values(n: int) -> np.ndarray:
        scales = np.repeat(10 ** rng.uniform(-0.5, 0.5, (n, 2, 4)), 64, axis=-1).astype(np.float32)
        return normal(n, 2, 256) * scales

    direction = normal(2, 256)
    alike = rng.uniform(-0.2, 0.3, 13).astype(np.float32)[:, None, None, None] * direction
    kinds = alike + 0.3 * keys_or_values(4 * 13).reshape(13, 4, 2, 256)  # kind, cell of the block, ...
    often = rng.integers(0, 4, SIZES.max_cells // 4 + 1)
    blocks = np.where(rng.random(often.size) < 0.6, often, rng.permutation(often.size) % 13)
    keys = kinds[blocks].reshape(-1, 2, 256)[: CELLS + TOKENS]
    values = keys_or_values(CELLS + TOKENS)
    values[CELLS + 1, 0, :64] = 0
    values[CELLS + 2, 1, 64:128] = rng.choice([-8.9e-6, 8.9e-6, 1e-7], 64)
    qcur = np.repeat(direction, 12, axis=0) + 0.3 * normal(TOKENS, 24, 256)
    qfull = np.concatenate([qcur, normal(TOKENS, 24, 256)], axis=-1)
    cache = Cache.of(SIZES, keys[:CELLS], values[:CELLS])
    return cache, qfull, qcur, keys[CELLS:], values[CELLS:]


@pytest.fixture(scope="module")
def clean() -> tuple[Given, lab.systems.Trace]:
    """A run of the shipped kernels, whose reference also serves the runs with mistakes: up to the first of
    them all buffers are the same."""
    given = layer(4)
    trace = lab.qsa.session().trace(*given, **HOW)
    remember_reference(trace)
    return given, trace


NEGATIVE = ("bits >> 31 ? ~bits", "bits >> 31 ? bits")
CELLS_OF_BLOCK = ("min(4u, n_kv - 4 * b)", "4u")
BLOCKS = ("(n_kv + 3) / 4", "n_kv / 4")
RESCALED = ("exp(from[c * STRIDE + QD] - top)", "1.0f")
GATE = ("/ (1.0f + exp(-gate))", "")
VALUE_SCALE = ("vsc[at / 64]", "vsc[at / 256 * 4]")

# Kernel, what somebody might have done wrong, and how its text becomes so.
MISTAKES: list[tuple[str, str, tuple[tuple[str, str], ...]]] = [
    ("qsa_quant", "truncated, not rounded", (("rint(", "trunc("),)),
    ("qsa_quant", "128 levels", (("/ 127.0f", "/ 128.0f"),)),
    ("qsa_quant", "not clamped", (("clamp(steps, -127.0f, 127.0f)", "steps"),)),
    ("qsa_quant", "divided by a scale of 0", (("step > 0.0f ?", "true ?"),)),
    (
        "qsa_quant", "rounded against the scale before its own rounding",
        (("step = float(scale)", "step = max(max(most.x, most.y), max(most.z, most.w)) / 127.0f"),),
    ),
    ("qsa_quant", "the largest with its sign", (("abs(from[j])", "from[j]"),)),
    ("qsa_quant", "the first cell forgotten", (("group = first * QKV * 4 + i", "group = i"),)),
    ("qsa_score", "the smallest product, not the largest", (("simd_max(best)", "simd_min(best)"),)),
    ("qsa_score", "the scale of another 64 dimensions", (("ksc[at / 16]", "ksc[at / 64 * 4]"),)),
    ("qsa_score", "query heads dealt out to KV heads in turn", (("h / HEADS * 64", "h % QKV * 64"),)),
    ("qsa_score", "a sum, not a mean", (("0.25f * sum", "sum"),)),
    ("qsa_score", "the last cell of a block left out", (("c < 4;", "c < 3;"),)),
    ("qsa_score", "the unfinished block left to chance", (("INFINITY : -INFINITY", "0.0f : -INFINITY"),)),
    ("qsa_score", "a token that does not see itself", (("args.pos0 + t + 1", "args.pos0 + t"),)),
    ("qsa_score", "rows too close together", (("args.max_cells / 4 + 2", "args.max_cells / 4 + 1"),)),
    (
        "qsa_topk", "equal scores by higher index",
        (
            ("const uint wanted = BUDGET - above_before[32];",
             "const uint wanted = BUDGET - above_before[32], skipped = level_before[32] - wanted;"),
            ("wanted - min(level, wanted)", "level + cells - min(level + cells, skipped)"),
            ("above + min(level, wanted)", "above + level - min(level, skipped)"),
        ),
    ),
    ("qsa_topk", "the last block keeps its highest cells", (("4 * b + c)", "4 * b + c + cells - taken)"),)),
    ("qsa_topk", "the unfinished block counted as whole", (CELLS_OF_BLOCK,)),
    ("qsa_topk", "the unfinished block left out", (BLOCKS,)),
    ("qsa_topk", "negative scores in reverse", (NEGATIVE,)),
    (
        "qsa_topk2", "equal scores not counted from the start",
        (("simd_prefix_exclusive_sum(mine.level)", "0"),),
    ),
    (
        "qsa_topk2", "the last block keeps its highest cells",
        (("4 * block + c)", "4 * block + c + cells - taken)"),),
    ),
    (
        "qsa_topk2", "another byte in the third pass",
        (("keys[j] >> shift & 255", "keys[j] >> (pass == 2 ? 0 : shift) & 255"),),
    ),
    (
        "qsa_topk2", "the suffix scan off by one",
        (("higher = simd_prefix_exclusive_sum(own)", "higher = simd_prefix_inclusive_sum(own)"),),
    ),
    (
        "qsa_topk2", "cells of higher digits not taken off those wanted",
        (("found[1] = cut.wanted - higher", "found[1] = cut.wanted"),),
    ),
    ("qsa_topk2", "only the last digit compared", (("known |= 255u << shift", "known = 255u << shift"),)),
    ("qsa_topk2", "the unfinished block left out", (BLOCKS,)),
    ("qsa_topk2", "negative scores in reverse", (NEGATIVE,)),
    ("qsa_attn", "the scale of another 64 dimensions", (("ksc[at]", "ksc[at / 4 * 4]"),)),
    ("qsa_attn", "the value scale of another 64 dimensions", (VALUE_SCALE,)),
    ("qsa_attn", "not divided by the root of 256", (("(1.0f / 16.0f)", "1.0f"),)),
    (
        "qsa_attn", "exponentials not relative to the maximum",
        (("exp(weights[c][h] - top)", "exp(weights[c][h])"),),
    ),
    ("qsa_attn", "the queries of other heads", (("qcur + (t * QH + kv * HEADS)", "qcur + (t * QH + kv)"),)),
    (
        "qsa_attn", "the last chunk taken for a whole one",
        (("min(uint(QCH), chosen - chunk * QCH)", "uint(QCH)"),),
    ),
    ("qsa_merge", "chunks not brought to one maximum", (RESCALED,)),
    ("qsa_merge", "the gate not applied", (GATE,)),
    ("qsa_merge", "the query taken for the gate", (("2 * QD + QD + i", "2 * QD + i"),)),
    ("qsa_merge", "the last chunk left out", (("(chosen + QCH - 1) / QCH", "chosen / QCH"),)),
    ("qsa_attn2", "head groups dealt out in turn", (("kv = group.y / QHG", "kv = group.y % QKV"),)),
    ("qsa_attn2", "the scale of another 64 dimensions", (("ksc[at / 2]", "ksc[at / 8 * 4]"),)),
    ("qsa_attn2", "the value scale of another 64 dimensions", (VALUE_SCALE,)),
    ("qsa_attn2", "the last dimensions left out", (("s < 8;", "s < 7;"),)),
    ("qsa_merge2", "chunks not brought to one maximum", (RESCALED,)),
    (
        "qsa_merge2", "every second chunk left out",
        (("halves[0][i / 2] + halves[1][i / 2]", "halves[0][i / 2]"),),
    ),
    ("qsa_merge2", "the gate not applied", (GATE,)),
    ("qsa_attn3", "the scale of another 64 dimensions", (("ksc[at * 4 + quarter]", "ksc[at * 4]"),)),
    (
        "qsa_attn3", "each half of a chunk with a maximum of its own",
        (("max(tops[0][head + j], tops[1][head + j])", "tops[side][head + j]"),),
    ),
    ("qsa_attn3", "the sum of half a chunk", (("sums[0][i] + sums[1][i]", "sums[0][i]"),)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "changes"),
    [(kernel, changes) for kernel, _, changes in MISTAKES],
    ids=[f"{kernel}: {what}" for kernel, what, _ in MISTAKES],
)
def test_a_mistake_is_found_at_the_dispatch_that_has_it(
    clean: tuple[Given, lab.systems.Trace], kernel: str, changes: tuple[tuple[str, str], ...]
) -> None:
    given, reference = clean
    session = lab.qsa.session()
    text = session.source(kernel)
    for right, wrong in changes:
        text = planted(kernel, text, right, wrong)
    session.replace(text, names=kernel)
    trace = session.trace(*given, **HOW)
    trace.reference = lambda of, chunk: reference.expected_of(chunk)
    found = trace.first_deviation()
    assert found is not None
    assert found.kernel == kernel
    assert trace[found.step].replaced
    print(found)


def test_every_kernel_has_mistakes_that_are_found() -> None:
    assert {kernel for kernel, _, _ in MISTAKES} == set(lab.qsa.CONTRACTS)


def test_the_shipped_kernels_do_not_deviate(clean: tuple[Given, lab.systems.Trace]) -> None:
    _, trace = clean
    assert trace.first_deviation() is None
    assert {d.kernel for d in trace.deviations} == set(lab.qsa.CONTRACTS)
    # What the tolerances leave out is little: they are a few times what rounding comes to.
    assert max(d.roundings / d.tolerance for d in trace.deviations if d.tolerance > 1) > 0.02
    assert max(d.relative for d in trace.deviations if d.buffer in ("scores", "part", "xp")) < 2e-6
    assert {d.buffer for d in trace.deviations} == {"kq", "vq", "ksc", "vsc", "scores", "ids", "part", "xp"}


def test_the_layer_has_what_mistakes_show_in(clean: tuple[Given, lab.systems.Trace]) -> None:
    _, trace = clean
    cuts = [s.cut for call in range(len(PATHS)) for s in lab.qsa.selections(trace, call)]
    reached = [cut for cut in cuts if cut is not None]
    assert [cut is None for cut in cuts] == [True] * 4 + [False] * 20
    assert any(len(cut.ties) > cut.ties_taken for cut in reached)
    assert any(len(cut.ties) == cut.ties_taken and not len(cut.cells_cut) for cut in reached)
    assert any(cut.score < 0 for cut in reached) and any(len(cut.cells_cut) for cut in reached)


def test_a_trace_may_begin_in_the_middle_and_with_an_empty_cache(seed: int) -> None:
    _, *inputs = layer(seed)
    cache = Cache.empty(SIZES)
    assert lab.qsa.trace(cache, *inputs).first_deviation() is None
    lab.qsa.run(cache, *(x[:10] for x in inputs))
    trace = lab.qsa.trace(cache, *(x[10:] for x in inputs), tokens=3)
    assert trace.first_deviation() is None and trace.about["cells"] == 10


def test_a_layer_can_go_on_from_any_call_of_a_trace(clean: tuple[Given, lab.systems.Trace]) -> None:
    (_, *inputs), trace = clean
    call = 5
    back = trace.buffers_at(trace.chunks[call].first_step)
    cache = Cache(SIZES, back, CELLS + 2 * call)
    rest = [x[2 * call :] for x in inputs]
    out = lab.qsa.session().run(cache, *rest, tokens=2, path=PATHS[call:])
    np.testing.assert_array_equal(out, lab.qsa.output(trace)[2 * call :])


def test_a_recording_is_held_to_the_reference_step_by_step(clean: tuple[Given, lab.systems.Trace]) -> None:
    given, _ = clean
    session = lab.qsa.session()
    trace, steps = session.recording(*given, **HOW)
    assert len(trace) == 0
    for number, step in zip(range(8), steps, strict=False):
        assert (step.number, len(trace)) == (number, number + 1)
        assert step.deviations and not any(d.exceeds for d in step.deviations)


# ---- changes and names ---------------------------------------------------------------------------------


def step_of(trace: lab.systems.Trace, kernel: str, call: int, nth: int = 0) -> lab.systems.Step:
    return [s for s in trace if s.kernel == kernel and s.chunk == call][nth]


def test_changes_are_shown_where_they_are(clean: tuple[Given, lab.systems.Trace]) -> None:
    _, trace = clean
    keys, values = (step_of(trace, "qsa_quant", 3, n) for n in (0, 1))
    assert (keys.written, values.written) == (("kq", "ksc"), ("vq", "vsc"))
    assert keys.changed("kq").any((-1, -2)).nonzero()[0].tolist() == [85, 86]
    assert not keys.changed("vq").any() and values.changed("vsc").any((-1, -2)).nonzero()[0].tolist() == [
        85,
        86,
    ]
    score = step_of(trace, "qsa_score", 3)  # tokens that see 86 and 87 cells: 21 blocks and an unfinished one
    assert score.changed("scores").sum(-1).tolist() == [22, 22]
    ids = step_of(trace, "qsa_topk", 3).changed("ids")
    assert ids.shape == (2, 83) and ids.all()


def test_elements_are_named_in_the_systems_terms(clean: tuple[Given, lab.systems.Trace]) -> None:
    _, trace = clean

    def told(kernel: str, call: int, buffer: str, *index: int, nth: int = 0) -> tuple[str, str]:
        return step_of(trace, kernel, call, nth).describe(buffer, index)

    # Call 3, on v1, has cells 85 and 86: its tokens see blocks 0 to 20, and two or three cells more.
    assert told("qsa_quant", 3, "kq", 86, 1, 70) == (
        "", "cell 86, KV head 1, dimension 70 (group of 64 1, token 1 of the call)",
    )  # fmt: skip
    assert told("qsa_quant", 3, "kq", 80, 1, 70)[1] == "cell 80, KV head 1, dimension 70 (group of 64 1)"
    assert told("qsa_quant", 3, "vsc", 85, 0, 3, nth=1)[1] == (
        "cell 85, KV head 0, group of 64 3 (token 0 of the call)"
    )
    assert told("qsa_score", 3, "scores", 0, 20)[1] == "token 0, block 20 (cells 80 to 83)"
    assert told("qsa_score", 3, "scores", 0, 21)[1] == "token 0, block 21 (cells 84 to 85, unfinished)"
    assert told("qsa_score", 3, "scores", 0, 22)[1] == "token 0, block 22 (without cells)"
    assert told("qsa_attn", 3, "part", 1, 2, 13, 7) == (
        "values", "token 1, chunk 2, head 13, dimension 7 (KV head 1, entries 80 to 82)",
    )  # fmt: skip
    assert told("qsa_attn", 3, "part", 1, 0, 5, 256) == (
        "max", "token 1, chunk 0, head 5 (KV head 0, entries 0 to 39)",
    )  # fmt: skip
    assert told("qsa_attn2", 4, "part", 0, 10, 5, 257) == (
        "sum", "token 0, chunk 10, head 5 (KV head 0, entries 80 to 82)",
    )  # fmt: skip
    assert told("qsa_merge", 3, "xp", 1, 12, 255)[1] == "token 1, head 12, dimension 255 (KV head 1)"
    assert told("qsa_topk", 0, "ids", 1, 60)[1] == "token 1, entry 60 (every cell, in order)"


def test_an_entry_of_ids_is_told_with_its_block_and_its_rank(clean: tuple[Given, lab.systems.Trace]) -> None:
    _, trace = clean
    step = step_of(trace, "qsa_topk", 9)
    scores, ids = step.value_before("scores")[0], step.value("ids")[0]
    blocks = -(-(CELLS + 19) // 4)
    order = np.argsort(-scores[:blocks], kind="stable").tolist()
    for entry in (0, 41, 82):
        block = int(ids[entry]) // 4
        assert step.describe("ids", (0, entry)) == (
            "", f"token 0, entry {entry} (block {block}, rank {order.index(block) + 1} of {blocks})",
        )  # fmt: skip


def test_a_wrong_entry_of_ids_is_told_with_the_one_expected(clean: tuple[Given, lab.systems.Trace]) -> None:
    given, _ = clean
    session = lab.qsa.session()
    text = planted("qsa_topk", session.source("qsa_topk"), "4 * b + c)", "4 * b + c + cells - taken)")
    session.replace(text, names="qsa_topk")
    trace = session.trace(*given, **HOW)
    found = trace.first_deviation()
    assert found is not None and found.buffer == "ids"
    token, entry = found.index
    (cut,) = (s.cut for s in lab.qsa.selections(trace, trace[found.step].chunk)[token : token + 1])
    assert cut is not None and found.value // 4 == found.expected // 4 == cut.last_block
    assert found.value - found.expected == len(cut.cells_cut)
    rank = len(cut.above) + cut.ties_taken
    of = f"block {cut.last_block}, rank {rank} of "
    assert found.where.startswith(f"token {token}, entry {entry} ({of}") and f"; expected {of}" in found.where


# ---- selections and records ----------------------------------------------------------------------------


def test_selections_are_those_of_the_scores_in_the_trace(clean: tuple[Given, lab.systems.Trace]) -> None:
    _, trace = clean
    for call in range(len(PATHS)):
        (step,) = (s for s in trace if s.chunk == call and "ids" in s.dispatch.writes)
        for token, found in enumerate(lab.qsa.selections(trace, call)):
            n_kv = CELLS + 2 * call + token + 1
            assert (found.n_kv, found.budget, found.everything) == (n_kv, 83, n_kv <= 83)
            np.testing.assert_array_equal(step.value("ids")[token][: len(found.ids)], found.ids)
    with pytest.raises(lab.ArgumentError, match="The trace has 12 calls: there is no call 12"):
        lab.qsa.selections(trace, 12)


def test_a_trace_is_cheap_where_little_changes() -> None:
    sizes = Sizes(qh=1, qkv=1, qbudget=16, qch=16, qch2=16, qhg=1, max_cells=8000)
    cache, *inputs = lab.qsa.example(sizes, 7900, 30)
    trace = lab.qsa.trace(cache, *inputs, tokens=1)
    kept = sum(a.nbytes for a in cache.arrays.values())
    # A token writes a cell, a row of scores and a few pages more.
    assert trace.nbytes < 1.2 * kept + 30 * (sizes.blocks * 4 + 10 * 2048)


def test_a_saved_trace_has_its_reference_again(seed: int, tmp_path: Path) -> None:
    given = layer(seed)
    trace = lab.qsa.trace(*given, **HOW)
    again = lab.qsa.load_trace(trace.save(tmp_path))
    assert again.deviations == trace.deviations and again.about == trace.about
    for old, new in zip(trace, again, strict=True):
        for buffer in old.dispatch.writes:
            np.testing.assert_array_equal(new.expected(buffer).values, old.expected(buffer).values)
    np.testing.assert_array_equal(lab.qsa.output(again), lab.qsa.output(trace))
    for old, new in zip(lab.qsa.selections(trace, 7), lab.qsa.selections(again, 7), strict=True):
        np.testing.assert_array_equal(new.ids, old.ids)
    assert again[40].describe("ids", (0, 5)) == trace[40].describe("ids", (0, 5))


def test_a_trace_of_another_system_is_not_loaded(tmp_path: Path) -> None:
    lab.systems.Trace("o1", {}, {}).save(tmp_path)
    with pytest.raises(lab.ArgumentError, match="is one of o1, not of qsa"):
        lab.qsa.load_trace(tmp_path)
