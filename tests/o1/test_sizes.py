"""Sizes: every limit is refused in a sentence that names the numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import lab
from lab.o1 import Sizes

GOOD: dict[str, Any] = {"ng": 2, "hpg": 4, "d": 128, "w": 32, "ns": 4, "m": 16}


def test_sizes_are_frozen_and_say_what_follows_from_them() -> None:
    sizes = Sizes(**GOOD, windows=(0, 20))
    assert (sizes.nh, sizes.ghm, sizes.scale) == (8, 128, 128**-0.5)
    assert [sizes.window(g) for g in range(2)] == [32, 20]
    assert (sizes.smallest_window, sizes.longest_chunk) == (20, 20)
    assert Sizes(**{**GOOD, "w": 2048}).longest_chunk == 64
    assert Sizes(**GOOD, windows=[0, 20]) == sizes and hash(sizes) == hash(Sizes(**GOOD, windows=(0, 20)))  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        sizes.ng = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"ng": 0}, "ng = 0 groups: the least is 1."),
        ({"hpg": 0}, "hpg = 0 query heads a group: the least is 1."),
        ({"hpg": 9}, "hpg = 9 query heads a group: the kernels take at most 8."),
        ({"d": 0}, "d = 0 dimensions a head: the least is 4."),
        ({"d": 30}, "d = 30 dimensions a head: it must be a multiple of 4."),
        ({"w": 0}, "w = 0 ring slots: the least is 1."),
        ({"ns": -1}, "ns = -1 sink tokens: the least is 0."),
        ({"m": 0}, "m = 0 landmarks: the least is 1."),
        ({"m": 33}, "m = 33 landmarks: the kernels take at most 32."),
        ({"windows": (4,)}, "windows has 1 entries for ng = 2 groups."),
        ({"windows": (4, 33)}, "The window 33 of group 1 does not fit w = 32 ring slots."),
        ({"windows": (-1, 4)}, "The window -1 of group 0 does not fit w = 32 ring slots."),
        ({"windows": 4}, "windows are whole numbers, one for each group, not 4."),
        ({"scale": float("nan")}, "scale is a finite number, not nan."),
        ({"d": 64.0}, "d is a whole number, not 64.0."),
        ({"ns": True}, "ns is a whole number, not True."),
    ],
)
def test_a_violated_limit_is_told_in_one_sentence(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(lab.ArgumentError) as caught:
        Sizes(**{**GOOD, **changed})
    assert str(caught.value) == told


def test_every_violated_limit_has_its_sentence() -> None:
    with pytest.raises(lab.ArgumentError) as caught:
        Sizes(ng=0, hpg=9, d=6, w=0, ns=-1, m=40)
    assert str(caught.value).count(":") == 6


@pytest.mark.parametrize(
    "limit", [{"hpg": 8}, {"m": 32}, {"m": 1}, {"ns": 0}, {"d": 4}, {"w": 1, "windows": (1, 1)}]
)
def test_limits_themselves_are_allowed(limit: dict[str, Any]) -> None:
    Sizes(**{**GOOD, **limit}).check_chunk(1)


def test_a_chunk_longer_than_a_window_is_refused_with_both_numbers() -> None:
    sizes = Sizes(**GOOD, windows=(0, 20))
    sizes.check_chunk(20)
    with pytest.raises(
        lab.ArgumentError, match=r"chunk of 21 rows is longer than the window of 20 .* group 1"
    ):
        sizes.check_chunk(21)
    with pytest.raises(lab.ArgumentError, match="chunk of 65 rows: the kernels take at most 64"):
        Sizes(**{**GOOD, "w": 2048}).check_chunk(65, "matmul")
    with pytest.raises(lab.ArgumentError, match="at least 1 row, not 0"):
        sizes.check_chunk(0)


def test_the_token_path_has_limits_of_its_own() -> None:
    Sizes(**GOOD).check_chunk(1, "token")
    with pytest.raises(lab.ArgumentError) as caught:
        Sizes(**{**GOOD, "hpg": 5, "d": 64}).check_chunk(2, "token")
    assert str(caught.value) == (
        "The token path takes 1 row, not 2. "
        "The token path takes hpg up to 4 query heads a group, not 5. "
        "The token path takes d = 128 or 256 dimensions a head, not 64."
    )
    with pytest.raises(lab.ArgumentError, match="no path 'row': a chunk takes chunk, matmul, token"):
        Sizes(**GOOD).check_chunk(1, "row")
