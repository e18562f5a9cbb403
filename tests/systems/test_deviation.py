"""Distances of elements: as the plain formula has them, the worst of them, and what counts for none."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from lab.systems.deviation import EPS, Distances, Expected
from lab.systems.plan import Field

INF = float("inf")


def field(shape: tuple[int, ...], start: int, stop: int) -> Field:
    terms = tuple((f"axis {i}", size) for i, size in enumerate((*shape[:-1], stop - start)))
    return Field("", start, stop, terms)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int32"])
def test_every_element_has_the_distance_of_the_plain_formula(rng: np.random.Generator, dtype: str) -> None:
    shape, part = (5, 7, 12), field((5, 7, 12), 3, 11)
    want = rng.integers(-90, 90, shape).astype(dtype)
    got = want.copy()
    changed = rng.random(shape) < 0.2
    got[changed] = rng.integers(-90, 90, changed.sum())
    defined, magnitude = rng.random(shape) < 0.9, rng.uniform(0.5, 90, shape)
    found = Distances.of(got, Expected(want, defined, magnitude), part)
    mine = np.s_[..., 3:11]
    absolute = np.where(defined, np.abs(got.astype(float) - want.astype(float)), 0)[mine].reshape(-1)
    largest = np.abs(want.astype(float))[mine][defined[mine]].max()
    roundings = absolute / (magnitude[mine].reshape(-1) * EPS)
    np.testing.assert_array_equal(found.absolute, absolute)
    np.testing.assert_allclose(found.relative, absolute / largest, rtol=1e-15)
    np.testing.assert_allclose(found.roundings, roundings, rtol=1e-15)
    assert found.worst == roundings.argmax()
    for element in (found.worst, 0, len(absolute) - 1):
        told = found.absolute[element], found.relative[element], found.roundings[element]
        assert found.at(element) == told


def test_what_is_no_number_is_infinitely_far_from_one_and_not_from_itself() -> None:
    nan = np.array([0xFF800001, 0x7FC00000], np.uint32).view(np.float32)  # signalling, quiet
    got = np.array([nan[0], nan[1], 1, INF, INF, nan[0], 2, nan[0]], np.float32)
    want = np.array([np.nan, 1, np.nan, INF, 4, INF, 2, 3])
    defined = np.array([1, 1, 1, 1, 1, 1, 1, 0], bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = Distances.of(got, Expected(want, defined, np.ones(8)), field((8,), 0, 8))
    far = [0, INF, INF, 0, INF, INF, 0, 0]
    assert found.absolute.tolist() == found.relative.tolist() == found.roundings.tolist() == far


def test_an_infinity_does_not_make_others_small() -> None:
    want = np.array([-1e30, 4, INF, 2])
    got = np.array([-1e30, 5, INF, 2], np.float32)
    found = Distances.of(got, Expected(want, np.ones(4, bool), np.ones(4)), field((4,), 0, 4))
    assert found.relative.tolist() == [0, 0.25, 0, 0] and found.worst == 1


def test_where_all_is_as_it_should_be_nothing_is_off() -> None:
    same = np.zeros((2, 3), np.int8)
    found = Distances.of(same, Expected(same, np.ones((2, 3), bool), np.zeros((2, 3))), field((2, 3), 0, 3))
    assert (found.worst, found.ulp, found.at(0)) == (0, 0.0, (0.0, 0.0, 0.0))
    assert not found.absolute.any() and found.absolute.shape == (6,)
