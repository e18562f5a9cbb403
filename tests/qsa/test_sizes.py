"""Sizes: every limit is refused in a sentence that names the numbers, a path's when it is asked for."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

import lab
from lab.qsa import Sizes
from lab.qsa.sizes import check_tokens


def test_sizes_are_those_of_the_specification_by_default() -> None:
    sizes = Sizes()
    assert dataclasses.asdict(sizes) == {
        "qh": 24, "qkv": 2, "qd": 256, "qbudget": 2051, "qch": 64, "qch2": 32, "qhg": 2, "max_cells": 4096,
    }  # fmt: skip
    assert dict(sizes.defines) == {
        "QH": 24, "QKV": 2, "QD": 256, "QBUDGET": 2051, "QCH": 64, "QCH2": 32, "QHG": 2,
    }  # fmt: skip
    for path in lab.qsa.PATHS:
        sizes.check_path(path)


def test_sizes_are_frozen_and_say_what_follows_from_them() -> None:
    sizes = Sizes(max_cells=5003)
    assert (sizes.heads_per_kv, sizes.blocks) == (12, 1252)
    assert [sizes.chunks(path) for path in lab.qsa.PATHS] == [33, 65, 33]
    assert [sizes.chunk_cells(path) for path in lab.qsa.PATHS] == [64, 32, 64]
    assert Sizes(max_cells=np.int64(5003)) == sizes and hash(sizes) == hash(Sizes(max_cells=5003))
    assert type(Sizes(max_cells=np.int64(5003)).max_cells) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        sizes.qh = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"qh": 0}, "qh = 0 query heads: the least is 1."),
        ({"qkv": 0}, "qkv = 0 KV heads: the least is 1."),
        ({"qd": 128}, "qd = 128 dimensions a head: the kernels take 256 and no other."),
        ({"qbudget": 0}, "qbudget = 0 cells to attend to: the least is 1."),
        ({"qch": 0}, "qch = 0 cells a chunk: the least is 1."),
        ({"qch2": -1}, "qch2 = -1 cells a chunk: the least is 1."),
        ({"qch2": 33}, "qch2 = 33 cells a chunk: the kernels take at most 32."),
        ({"qhg": 0}, "qhg = 0 head groups: the least is 1."),
        ({"max_cells": 0}, "max_cells = 0 cells of the cache: the least is 1."),
        (
            {"max_cells": 8388609},
            "max_cells = 8388609 cells of 512 numbers: the kernels count to 4294967296.",
        ),
        ({"qkv": 5}, "qh = 24 query heads do not come in equal parts to qkv = 5 KV heads."),
        ({"qbudget": 64.0}, "qbudget is a whole number, not 64.0."),
        ({"qhg": True}, "qhg is a whole number, not True."),
        ({"qch": "64"}, "qch is a whole number, not '64'."),
    ],
)
def test_a_violated_limit_is_told_in_one_sentence(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(lab.ArgumentError) as caught:
        Sizes(**changed)
    assert str(caught.value) == told


def test_every_violated_limit_has_its_sentence() -> None:
    with pytest.raises(lab.ArgumentError) as caught:
        Sizes(qh=7, qkv=2, qd=64, qbudget=-3, qch=0, qch2=64, qhg=0, max_cells=0)
    assert len(re.findall(r"\.(?:\s|$)", str(caught.value))) == 7


@pytest.mark.parametrize(
    "limit", [{"qch2": 32}, {"qch2": 1}, {"qbudget": 1}, {"max_cells": 1}, {"qh": 1, "qkv": 1}, {"qkv": 24}]
)
def test_limits_themselves_are_allowed(limit: dict[str, Any]) -> None:
    Sizes(**limit)


@pytest.mark.parametrize(
    ("path", "allowed", "changed", "told"),
    [
        (
            "v2", {"qhg": 12}, {"qhg": 5},
            "The path v2 cuts the 12 query heads of a KV head into qhg = 5 equal groups, which is not "
            "possible.",
        ),
        (
            "v2", {"qh": 16, "qhg": 1}, {"qh": 18, "qhg": 1},
            "The path v2 takes up to 8 query heads a head group, not qh / qkv / qhg = 9.",
        ),
        (
            "v2", {"qbudget": 4096}, {"qbudget": 4097},
            "The path v2 takes up to 128 chunks, not the 129 of qbudget = 4097 cells by qch2 = 32.",
        ),
        (
            "v3", {"qh": 12, "qkv": 1}, {"qh": 8},
            "The path v3 takes qh / qkv = 12 query heads a KV head, not 4.",
        ),
        ("v3", {"qch": 64}, {"qch": 65}, "The path v3 takes qch up to 64 cells a chunk, not 65."),
    ],
)  # fmt: skip
def test_a_path_s_own_limit_is_told_when_it_is_asked_for(
    path: str, allowed: dict[str, Any], changed: dict[str, Any], told: str
) -> None:
    Sizes(**allowed).check_path(path)
    sizes = Sizes(**changed)
    for refused in (lambda: sizes.check_path(path), lambda: lab.qsa.plan(sizes, path, 1, 0)):
        with pytest.raises(lab.ArgumentError) as caught:
            refused()
        assert str(caught.value) == told


def test_every_limit_of_a_path_has_its_sentence() -> None:
    with pytest.raises(lab.ArgumentError) as caught:
        Sizes(qh=8, qch=65).check_path("v3")
    assert str(caught.value) == (
        "The path v3 takes qh / qkv = 12 query heads a KV head, not 4. "
        "The path v3 takes qch up to 64 cells a chunk, not 65."
    )


def test_a_path_that_there_is_not_is_refused_by_name() -> None:
    with pytest.raises(lab.ArgumentError, match=r"There is no path 'v4': a call takes v1, v2, v3\."):
        Sizes().check_path("v4")


@pytest.mark.parametrize("n_tok", [0, 9, -1, 2.0, True, None])
def test_a_call_has_1_to_8_tokens(n_tok: Any) -> None:
    for allowed in (1, 8, np.int32(3)):
        check_tokens(allowed)
    with pytest.raises(lab.ArgumentError) as caught:
        check_tokens(n_tok)
    assert str(caught.value) == f"A call has 1 to 8 tokens, not {n_tok!r}."
