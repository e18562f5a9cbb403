"""Versions of buffers: exact, and sharing what did not change."""

from __future__ import annotations

import numpy as np
import pytest

from lab.systems.versions import PAGE, Pages, Store


@pytest.mark.parametrize("dtype", ["float32", "uint32", "int8", "float16"])
def test_every_version_comes_back_bit_for_bit(rng: np.random.Generator, dtype: str) -> None:
    pages = Pages()
    array = rng.integers(0, 255, 40_000, np.uint8).view(dtype).copy()
    versions = [(pages.add(array), array.copy())]
    for _ in range(12):
        start, length = rng.integers(0, array.size), rng.integers(0, 600)
        array[start : start + length] = rng.integers(0, 100, array[start : start + length].size)
        versions.append((pages.add(array, versions[-1][0]), array.copy()))
    for version, kept in versions:
        found = pages.array(version)
        assert found.shape == kept.shape and found.dtype == kept.dtype
        np.testing.assert_array_equal(found.view(np.uint8), kept.view(np.uint8))


def test_what_did_not_change_is_shared() -> None:
    pages = Pages()
    array = np.arange(100 * PAGE // 4, dtype=np.float32)
    first = pages.add(array)
    assert pages.nbytes == array.nbytes
    assert pages.add(array.copy(), first) is first
    array[5000] = -1.0
    second = pages.add(array, first)
    assert pages.nbytes == array.nbytes + PAGE and second is not first


def test_repeated_pages_are_kept_once() -> None:
    pages = Pages()
    pages.add(np.full(100 * PAGE // 4, np.nan, np.float32))
    assert pages.nbytes == PAGE


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (PAGE // 4 + 1,), (3, 5, 7)])
def test_any_shape_is_kept(shape: tuple[int, ...]) -> None:
    store = Store()
    array = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    found = store.array("a", store.add("a", array))
    assert found.shape == shape
    np.testing.assert_array_equal(found, array)


def test_a_buffer_may_change_its_shape() -> None:
    store = Store()
    one = store.add("a", np.zeros(4, np.float32))
    other = store.add("a", np.zeros((2, 2), np.float32), one)
    third = store.add("a", np.ones(5000, np.float32), other)
    assert store.array("a", other).shape == (2, 2)
    np.testing.assert_array_equal(store.array("a", one), np.zeros(4))
    np.testing.assert_array_equal(store.array("a", third), np.ones(5000))
