"""Plans of QSA: the specification's grids and buffers, as data."""

from __future__ import annotations

import json

import numpy as np
import pytest

import lab
import lab.qsa
from lab import systems
from lab.qsa import Sizes
from lab.qsa.plans import append_plan, cells_before

SIZES = Sizes(qh=24, qkv=2, qbudget=70, qch=16, qch2=8, qhg=3, max_cells=203)


def sizes_of(plan: systems.Plan) -> dict[str, tuple[int, ...]]:
    return {d.kernel: (*(d.groups or ()), *d.threadgroup) for d in plan.dispatches}


def test_dispatches_are_those_of_the_specification() -> None:
    found = {path: lab.qsa.plan(SIZES, path, 3, 100) for path in lab.qsa.PATHS}
    kernels = {path: [d.kernel for d in plan.dispatches] for path, plan in found.items()}
    both = ["qsa_quant", "qsa_quant", "qsa_score"]
    assert kernels == {
        "v1": [*both, "qsa_topk", "qsa_attn", "qsa_merge"],
        "v2": [*both, "qsa_topk2", "qsa_attn2", "qsa_merge2"],
        "v3": [*both, "qsa_topk2", "qsa_attn3", "qsa_merge"],
    }
    assert sizes_of(found["v1"])["qsa_topk"] == (3, 1, 1, 1024, 1, 1)
    assert sizes_of(found["v1"])["qsa_attn"] == (5, 2, 3, 256, 1, 1)
    assert sizes_of(found["v1"])["qsa_merge"] == (24, 3, 1, 256, 1, 1)
    assert sizes_of(found["v2"])["qsa_topk2"] == (3, 1, 1, 1024, 1, 1)
    assert sizes_of(found["v2"])["qsa_attn2"] == (9, 6, 3, 256, 1, 1)
    assert sizes_of(found["v2"])["qsa_merge2"] == (24, 3, 1, 256, 1, 1)
    assert sizes_of(found["v3"])["qsa_attn3"] == (5, 2, 3, 256, 1, 1)


@pytest.mark.parametrize(("pos0", "n_tok"), [(0, 1), (0, 3), (0, 4), (27, 1), (28, 8), (100, 3), (195, 8)])
def test_score_and_quantisation_have_threads_for_all_there_is(pos0: int, n_tok: int) -> None:
    plan = lab.qsa.plan(SIZES, "v2", n_tok, pos0)
    keys, values, score, *_ = plan.dispatches
    assert keys.grid == values.grid == (n_tok * 2 * 4, 1, 1)
    # A simdgroup a block, the unfinished one of the last token included.
    assert score.groups is not None
    blocks, tokens = score.groups[0] * score.threadgroup[0] // 32, score.groups[1]
    assert tokens == n_tok and (pos0 + n_tok) // 4 + 1 <= blocks < (pos0 + n_tok) // 4 + 1 + 8


def test_keys_and_values_are_quantised_by_one_kernel_on_two_sets_of_buffers() -> None:
    keys, values, *_ = lab.qsa.plan(SIZES, "v1", 3, 100).dispatches
    assert keys.buffers == ("k", "kq", "ksc", "first") and keys.writes == ("kq", "ksc")
    assert values.buffers == ("v", "vq", "vsc", "first") and values.writes == ("vq", "vsc")
    assert keys.constants == values.constants == {"first": 100}


def test_buffers_have_the_specification_s_shapes() -> None:
    plan = lab.qsa.plan(SIZES, "v2", 3, 100)
    shapes = {name: (b.dtype, b.shape, b.role) for name, b in plan.buffers.items()}
    assert shapes == {
        "qfull": ("float32", (3, 24, 512), "input"),
        "qcur": ("float32", (3, 24, 256), "input"),
        "k": ("float32", (3, 2, 256), "input"),
        "v": ("float32", (3, 2, 256), "input"),
        "kq": ("int8", (203, 2, 256), "state"),
        "vq": ("int8", (203, 2, 256), "state"),
        "ksc": ("float16", (203, 2, 4), "state"),
        "vsc": ("float16", (203, 2, 4), "state"),
        "scores": ("float32", (3, 52), "scratch"),
        "ids": ("int32", (3, 70), "scratch"),
        "part": ("float32", (3, 9, 24, 258), "scratch"),
        "xp": ("float32", (3, 24, 256), "output"),
    }
    assert lab.qsa.plan(SIZES, "v1", 3, 100).buffers["part"].shape == (3, 5, 24, 258)


@pytest.mark.parametrize("path", lab.qsa.PATHS)
def test_fields_lie_within_their_buffers_and_count_their_elements(path: str) -> None:
    for buffer in lab.qsa.plan(SIZES, path, 7, 100).buffers.values():
        covered = np.zeros(buffer.shape[-1], int)
        for field in buffer.fields:
            covered[field.start : field.stop] += 1
            assert np.prod(field.shape) == (field.stop - field.start) * np.prod(buffer.shape[:-1])
            assert (field.tolerance == 0) == (field.why == "")
        assert (covered == 1).all()


@pytest.mark.parametrize("path", lab.qsa.PATHS)
def test_every_buffer_of_a_dispatch_is_described_in_the_type_of_its_kernel(path: str) -> None:
    system = lab.qsa.system()
    plan = lab.qsa.plan(SIZES, path, 2, 100)
    for dispatch in plan.dispatches:
        contract = system.contracts[dispatch.kernel]
        for name, of_kernel in zip(dispatch.buffers, contract.buffers, strict=True):
            if name in dispatch.constants:
                continue
            assert plan.buffers[name].dtype == system.types[of_kernel]
        assert set(dispatch.writes) <= set(dispatch.buffers)
        told = json.loads(json.dumps(dispatch.as_record()))
        assert systems.Dispatch.from_record(told) == dispatch


def test_shipped_kernels_fit_their_contracts_and_are_all_there() -> None:
    session = lab.qsa.session()
    for name in lab.qsa.CONTRACTS:
        signature = session.shipped(name).signature
        assert systems.contract.refusal(session.system, signature) == ""


def test_constants_come_from_the_sizes() -> None:
    plan = lab.qsa.plan(SIZES, "v2", 3, 100, first=5)
    assert plan.defines == SIZES.defines and (plan.first, plan.rows, cells_before(plan)) == (5, 3, 100)
    for dispatch in plan.dispatches[2:]:
        assert dispatch.constants["args"] == {"pos0": 100, "max_cells": 203}


def test_tokens_are_cut_into_calls() -> None:
    def cut(rows: int, tokens: object = None, path: object = "v2") -> list[tuple[str, int, int, int]]:
        found = lab.qsa.plans(SIZES, rows, 100, tokens, path)  # type: ignore[arg-type]
        return [(p.path, p.first, p.rows, cells_before(p)) for p in found]

    assert cut(19) == [("v2", 0, 8, 100), ("v2", 8, 8, 108), ("v2", 16, 3, 116)]
    assert cut(5, 4) == [("v2", 0, 4, 100), ("v2", 4, 1, 104)]
    assert cut(4, [1, 3], ["v1", "v3"]) == [("v1", 0, 1, 100), ("v3", 1, 3, 101)]
    assert cut(3, np.array([2, 1])) == [("v2", 0, 2, 100), ("v2", 2, 1, 102)]
    assert cut(0) == []
    with pytest.raises(lab.ArgumentError, match="calls have 3 tokens together, the inputs 4"):
        cut(4, [1, 2])
    with pytest.raises(lab.ArgumentError, match="1 paths for 2 calls"):
        cut(5, 4, ["v1"])
    with pytest.raises(lab.ArgumentError, match="1 to 8 tokens, not 9"):
        cut(9, 9)
    with pytest.raises(lab.ArgumentError, match="1 to 8 tokens, not 0"):
        cut(4, [0, 4])
    with pytest.raises(lab.ArgumentError, match=r"no path 'v0'"):
        cut(4, None, "v0")


def test_a_cache_that_is_too_small_is_told_with_the_numbers() -> None:
    lab.qsa.plan(SIZES, "v1", 3, 200)
    lab.qsa.plans(SIZES, 103, 100)
    told = "room for max_cells = 203 cells: {} are there, {} more do not fit"
    with pytest.raises(lab.ArgumentError, match=told.format(201, 3)):
        lab.qsa.plan(SIZES, "v1", 3, 201)
    with pytest.raises(lab.ArgumentError, match=told.format(100, 104)):
        lab.qsa.plans(SIZES, 104, 100)
    with pytest.raises(lab.ArgumentError, match=told.format(100, 104)):
        append_plan(SIZES, 104, 100)
    with pytest.raises(lab.ArgumentError, match="There are no -1 cells before a call"):
        lab.qsa.plan(SIZES, "v1", 3, -1)
