"""The 8-bit cache: what it holds, how it grows, what it refuses."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import lab
import lab.qsa
from lab.qsa import Cache, Quantised, Sizes

SIZES = Sizes(qh=6, qkv=3, qbudget=20, max_cells=50)
BUFFERS = ("kq", "vq", "ksc", "vsc")


def keys_and_values(rng: np.random.Generator, cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Normal random numbers of sizes that differ much between groups of 64, one of them all zero."""
    found = []
    for _ in range(2):
        x = rng.standard_normal((cells, 3, 4, 64), dtype=np.float32)
        x *= (10.0 ** rng.uniform(-3, 3, (cells, 3, 4, 1))).astype(np.float32)
        x[:1, 1, 2] = 0
        found.append(x.reshape(cells, 3, 256))
    return found[0], found[1]


def contents(cache: Cache) -> dict[str, np.ndarray]:
    """The filled cells of its buffers."""
    return {name: np.asarray(cache.arrays[name])[: cache.cells] for name in BUFFERS}


def test_a_cache_is_int8_with_half_scales(rng: np.random.Generator) -> None:
    cache = Cache.of(SIZES, *keys_and_values(rng, 30))
    assert cache.cells == 30
    assert cache.kq.shape == cache.vq.shape == (50, 3, 256) and cache.kq.dtype == mx.int8
    assert cache.ksc.shape == cache.vsc.shape == (50, 3, 4) and cache.ksc.dtype == mx.float16
    for quantised, exact in zip(cache.quantised, cache.floats, strict=True):
        assert len(quantised) == 30
        scales = np.repeat(quantised.scale.astype(float), 64, -1).reshape(exact.shape)
        # Half a step, and what rounding the scale to half leaves of the largest value.
        largest = np.abs(exact).reshape(30, 3, 4, 64).max(-1).repeat(64, -1).reshape(exact.shape)
        assert (np.abs(quantised.floats() - exact) <= scales / 2 + largest * 2.0**-11 + 1e-12).all()
        assert np.abs(quantised.q).max() == 127
        zero = np.abs(exact).reshape(30, 3, 4, 64).max(-1) == 0
        assert zero.any() and not quantised.scale[zero].any()


def test_a_cache_holds_what_the_reference_makes_of_the_numbers(rng: np.random.Generator) -> None:
    keys, values = keys_and_values(rng, 40)
    cache = Cache.of(SIZES, keys, values)
    for found, exact in zip(cache.quantised, (keys, values), strict=True):
        wanted = Quantised.of(exact)
        # Where a quotient's rounding is undecided, either is right: rare, and by one step.
        different = found.q != wanted.q
        assert (
            different.mean() < 1e-3 and np.abs(found.q.astype(int) - wanted.q)[different].max(initial=0) <= 1
        )
        np.testing.assert_array_equal(found.scale, wanted.scale)


def test_cells_appended_in_parts_are_those_of_one_go(rng: np.random.Generator) -> None:
    keys, values = keys_and_values(rng, 44)
    whole = Cache.of(SIZES, keys, values)
    for cuts in ([0, 44], [0, 1, 2, 44], [0, 13, 13, 30, 44], list(range(45))):
        cache = Cache.empty(SIZES)
        for start, stop in pairwise(cuts):
            cache.append(keys[start:stop], values[start:stop])
        assert cache.cells == 44
        for name, array in whole.arrays.items():
            np.testing.assert_array_equal(cache.arrays[name], array)
        for mine, theirs in zip(cache.floats, (keys, values), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_appending_leaves_other_cells_alone_and_stays_on_the_arrays(rng: np.random.Generator) -> None:
    cache = Cache.of(SIZES, *keys_and_values(rng, 20))
    before, arrays = contents(cache), dict(cache.arrays)
    cache.append(*keys_and_values(rng, 5))
    assert cache.cells == 25 and all(cache.arrays[name] is arrays[name] for name in BUFFERS)
    for name, array in contents(cache).items():
        np.testing.assert_array_equal(array[:20], before[name])
        assert not np.asarray(cache.arrays[name])[25:].any()


def test_a_copy_has_memory_of_its_own(rng: np.random.Generator) -> None:
    cache = Cache.of(SIZES, *keys_and_values(rng, 20))
    other = cache.copy()
    other.append(*keys_and_values(rng, 5))
    assert (cache.cells, other.cells) == (20, 25)
    assert not np.asarray(cache.kq)[20:].any() and np.asarray(other.kq)[20:25].any()
    assert len(cache.floats[0]) == 20 and len(other.floats[0]) == 25


def test_a_cache_made_from_buffers_goes_on_but_does_not_know_its_numbers(rng: np.random.Generator) -> None:
    first = Cache.of(SIZES, *keys_and_values(rng, 20))
    cache = Cache(SIZES, first.arrays, 20)
    more = keys_and_values(rng, 5)
    first.append(*more)
    cache.append(*more)
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(cache.arrays[name], array)
    assert first.knows_floats and not cache.knows_floats
    with pytest.raises(lab.ArgumentError, match="made from buffers with 25 cells in them: what these were"):
        _ = cache.floats
    with pytest.raises(lab.ArgumentError, match=r"needs the buffer 'ksc', float16 \(50, 3, 4\)"):
        Cache(SIZES, {name: first.arrays[name] for name in ("kq", "vq", "vsc")}, 20)
    with pytest.raises(lab.ArgumentError, match="room for max_cells = 50 cells: 51 are there"):
        Cache(SIZES, first.arrays, 51)


def test_an_empty_cache_has_no_numbers() -> None:
    cache = Cache.empty(SIZES)
    assert cache.cells == 0 and cache.knows_floats
    assert [x.shape for x in cache.floats] == [(0, 3, 256)] * 2
    cache.append(np.zeros((0, 3, 256)), np.zeros((0, 3, 256)))
    assert cache.cells == 0
    assert repr(cache) == "<qsa cache: 0 of 50 cells, qh 6, qkv 3, qd 256>"
    with pytest.raises(AttributeError, match="no 'kw': its buffers are kq, vq, ksc, vsc"):
        _ = cache.kw


def test_replaced_kernels_do_not_make_caches(rng: np.random.Generator) -> None:
    keys, values = keys_and_values(rng, 10)
    before = Cache.of(SIZES, keys, values)
    text = lab.qsa.default_session().source("qsa_quant")
    assert "/ 127.0f" in text
    lab.qsa.replace(text.replace("/ 127.0f", "/ 100.0f"), "qsa_quant")
    try:
        after = Cache.of(SIZES, keys, values)
    finally:
        lab.qsa.restore()
    np.testing.assert_array_equal(after.ksc, before.ksc)


# ---- what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "shown"),
    [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf"), (-8319009.0, "-8319009.0"), (1e30, "1")],
)
def test_numbers_that_8_bits_cannot_hold_are_refused(
    rng: np.random.Generator, number: float, shown: str
) -> None:
    keys, values = keys_and_values(rng, 10)
    values[7, 2, 130] = number
    cache = Cache.empty(SIZES)
    with pytest.raises(lab.ArgumentError) as caught:
        cache.append(keys, values)
    told = str(caught.value)
    assert told.startswith(f"The value of token 7 is {shown}")
    assert told.endswith("at KV head 2, dimension 130: the cache holds numbers up to 8319008.")
    assert cache.cells == 0


def test_the_largest_numbers_are_held(rng: np.random.Generator) -> None:
    keys, values = keys_and_values(rng, 4)
    keys[2, 1, 70] = 8319008.0
    cache = Cache.of(SIZES, keys, values)
    assert cache.quantised[0].floats()[2, 1, 70] == 8319008.0 and np.isfinite(np.asarray(cache.ksc)).all()


def test_wrong_shapes_are_refused(rng: np.random.Generator) -> None:
    keys, values = keys_and_values(rng, 10)
    given: list[tuple[Any, Any, str]] = [
        (keys, values[1:], r"v has the shape \(9, 3, 256\); it takes \(10, 3, 256\)"),
        (keys[:, 1:], values, r"k has the shape \(10, 2, 256\); it takes \(10, 3, 256\)"),
        (np.zeros(4), values, r"k has the shape \(4,\); it takes \(4, 3, 256\)"),
    ]
    for k, v, told in given:
        with pytest.raises(lab.ArgumentError, match=told):
            Cache.of(SIZES, k, v)
    cache = Cache.of(SIZES, *keys_and_values(rng, 45))
    with pytest.raises(lab.ArgumentError, match="max_cells = 50 cells: 45 are there, 10 more do not fit"):
        cache.append(keys, values)
    assert cache.cells == 45


# ---- what the 8 bits cost ------------------------------------------------------------------------------


def test_the_quantisation_error_is_reported(seed: int) -> None:
    cache, *inputs = lab.qsa.example(SIZES, 40, 3, seed)
    found = lab.qsa.quantisation_error(cache, *inputs)
    exact = lab.qsa.full_attention(cache, *inputs)
    everything = [np.arange(n_kv) for n_kv in (41, 42, 43)]
    rounded = lab.qsa.attention(cache, *inputs, ids=everything)
    assert found.largest == np.abs(exact).max()
    assert found.max_absolute == np.abs(rounded - exact).max()
    # 8 bits of a normal number: the largest of 64 is about 2.5, a step 0.02, an error 0.006 in the root mean.
    assert 1e-4 < found.mean_relative < found.max_relative < 0.05
    assert cache.cells == 40, "the cache is left alone"
    with pytest.raises(lab.ArgumentError, match="what these were before"):
        lab.qsa.quantisation_error(Cache(SIZES, cache.arrays, 40), *inputs)


def test_there_is_no_quantisation_error_where_8_bits_suffice(rng: np.random.Generator) -> None:
    def numbers(*shape: int) -> np.ndarray:
        x = rng.integers(-127, 128, shape).astype(np.float32)
        x[..., ::64] = 127
        return x / 64

    cache = Cache.of(SIZES, numbers(30, 3, 256), numbers(30, 3, 256))
    query = rng.standard_normal((2, 6, 512), dtype=np.float32)
    found = lab.qsa.quantisation_error(cache, query, query[..., :256], numbers(2, 3, 256), numbers(2, 3, 256))
    assert found.max_absolute == 0 and found.largest > 0.1
