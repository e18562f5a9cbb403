"""Sessions of o1: any mix of chunks and paths, replaced kernels, the default session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import lab
import lab.o1
from lab.o1 import Sizes

SIZES = Sizes(ng=2, hpg=3, d=128, w=14, ns=2, m=6, windows=(0, 9))
ROWS = 60
TOLERANCE = 2e-6  # of the largest output

# o1c_land as somebody else has it: other names, plain float pointers, one thread for all heads of a row.
FOREIGN = """#include <metal_stdlib>
using namespace metal;
struct params { uint heads, marks, slots, sinks, dim, all, kv, rows, start, total; float sc; uint unused; };

kernel void o1c_land(device const float* queries [[buffer(0)]], device const float* marks [[buffer(1)]],
                     device float* scores [[buffer(2)]], constant params& p [[buffer(3)]],
                     uint3 at [[thread_position_in_grid]])
{
    if (at.x >= p.marks) {
        return;
    }
    for (uint h = 0; h < p.heads; h++) {
        float sum = 0.0f;
        for (uint x = 0; x < p.dim; x++) {
            sum += queries[((p.start + at.z) * p.all + at.y * p.heads + h) * p.dim + x]
                 * marks[(at.y * p.marks + at.x) * p.dim + x];
        }
        scores[((at.z * p.kv + at.y) * p.marks + at.x) * p.heads + h] = p.sc * sum;
    }
}
"""


@pytest.fixture(autouse=True)
def default_session_as_it_was() -> Iterator[None]:
    yield
    lab.o1.restore()


def off(out: Any, exact: np.ndarray) -> float:
    """Largest deviation, as a share of the largest output."""
    return float(np.abs(np.asarray(out) - exact).max() / np.abs(exact).max())


def random_chunks(rng: np.random.Generator, sizes: Sizes, rows: int) -> dict[str, Any]:
    chunks: list[int] = []
    paths = []
    while sum(chunks) < rows:
        path = str(rng.choice(lab.o1.PATHS))
        most = min(sizes.longest_chunk, rows - sum(chunks))
        chunks.append(1 if path == "token" else int(rng.integers(1, most + 1)))
        paths.append(path)
    return {"chunks": chunks, "path": paths}


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"chunks": 1},
        {"chunks": 7, "path": "matmul"},
        {"path": "matmul"},
        {"path": "token"},
        {
            "chunks": [9, 1, 5, 4, 1, 9, 9, 1, 8, 9, 4],
            "path": ["matmul", "token", "chunk"] * 3 + ["chunk"] * 2,
        },
    ],
    ids=str,
)
def test_every_path_and_chunking_gives_the_definition(seed: int, how: dict[str, Any]) -> None:
    state, q, k, v = lab.o1.example(SIZES, ROWS, seed)
    exact = lab.o1.attention(state, q, k, v)
    out = lab.o1.run(state, q, k, v, **how)
    assert out.shape == (ROWS, SIZES.nh, SIZES.d) and out.dtype == mx.float32
    assert off(out, exact) <= TOLERANCE
    assert state.tokens == ROWS


@pytest.mark.parametrize("number", range(6))
def test_random_sizes_and_mixtures_agree_with_the_definition(seed: int, number: int) -> None:
    rng = np.random.default_rng(seed + number)
    ng, w = int(rng.integers(1, 4)), int(rng.integers(1, 20))
    sizes = Sizes(
        ng=ng,
        hpg=int(rng.integers(1, 5)),
        d=128,
        w=w,
        ns=int(rng.integers(0, 4)),
        m=int(rng.integers(1, 33)),
        windows=tuple(int(x) for x in rng.integers(0, w + 1, ng)),
    )
    rows = int(rng.integers(1, 4 * w + 3))
    state, q, k, v = lab.o1.example(sizes, rows, seed)
    how = random_chunks(rng, sizes, rows)
    print(sizes, how)
    exact = lab.o1.attention(state, q, k, v)
    assert off(lab.o1.run(state, q, k, v, **how), exact) <= TOLERANCE


def test_a_sequence_may_come_in_parts(seed: int) -> None:
    state, q, k, v = lab.o1.example(SIZES, ROWS, seed)
    exact = lab.o1.attention(state, q, k, v)
    parts = [slice(0, 13), slice(13, 13), slice(13, 40), slice(40, ROWS)]
    outs = [lab.o1.run(state, q[p], k[p], v[p]) for p in parts]
    assert off(mx.concatenate(outs), exact) <= TOLERANCE
    # What comes after is compared with all that came before.
    more = lab.o1.attention(state, q[:5], k[:5], v[:5])
    assert off(lab.o1.run(state, q[:5], k[:5], v[:5], path="matmul"), more) <= TOLERANCE


def test_inputs_may_be_numpy_arrays_of_any_float_dtype() -> None:
    state, *rows = lab.o1.example(SIZES, 5)
    other = state.copy()
    halves = [np.asarray(x).astype(np.float16) for x in rows]
    out = lab.o1.run(state, *halves)
    np.testing.assert_array_equal(out, lab.o1.run(other, *(mx.array(x).astype(mx.float32) for x in halves)))


def test_wrong_inputs_are_refused_before_anything_runs() -> None:
    state, q, k, v = lab.o1.example(SIZES, 20)
    with pytest.raises(lab.ArgumentError, match=r"v has the shape \(19, 2, 128\); it takes \(20, 2, 128\)"):
        lab.o1.run(state, q, k, v[1:])
    with pytest.raises(lab.ArgumentError, match="10 rows is longer than the window of 9 tokens of group 1"):
        lab.o1.run(state, q, k, v, chunks=[9, 10, 1])
    with pytest.raises(lab.ArgumentError, match="There is no path 'tokens'"):
        lab.o1.run(state, q, k, v, path="tokens")
    with pytest.raises(lab.ArgumentError, match="There is no engine called 'gpu'"):
        lab.o1.session("gpu")
    assert state.tokens == 0


def test_state_stays_on_the_same_arrays() -> None:
    state, q, k, v = lab.o1.example(SIZES, 20)
    before = dict(state.arrays)
    lab.o1.run(state, q, k, v)
    assert all(state.arrays[name] is array for name, array in before.items())


def test_full_attention_and_the_ideal_far_field_are_at_hand(seed: int) -> None:
    state, q, k, v = lab.o1.example(SIZES, 30, seed)
    full, ideal = lab.o1.full_attention(state, q, k, v), lab.o1.ideal(state, q, k, v)
    assert full.shape == (30, SIZES.nh, SIZES.d) and ideal.share.shape == (30, SIZES.nh)
    assert (ideal.share[:9] == 0).all() and (ideal.share[14:] > 0).all()
    # While nothing is evicted, the system is full attention.
    assert off(lab.o1.run(state, q[:9], k[:9], v[:9]), full[:9]) <= TOLERANCE


# ---- replacing -----------------------------------------------------------------------------------------


def test_a_foreign_kernel_works_unmodified(seed: int) -> None:
    state, q, k, v = lab.o1.example(SIZES, ROWS, seed)
    exact = lab.o1.attention(state, q, k, v)
    session = lab.o1.session()
    assert session.replace(FOREIGN).names == ("o1c_land",)
    assert session.trace(state, q, k, v, chunks=9).first_deviation() is None
    assert off(session.run(state, q, k, v), exact) <= TOLERANCE


def test_several_kernels_of_one_source_are_replaced_at_once() -> None:
    session = lab.o1.session()
    folder = lab.resources.kernels() / "o1"
    assert len(session.replace(folder / "o1_token.metal")) == 4
    assert set(session.restore()) == {n for n in lab.o1.CONTRACTS if n.startswith("o1c_tok")}


def test_a_kernel_that_does_not_fit_is_refused_with_the_difference() -> None:
    with pytest.raises(lab.ArgumentError) as caught:
        lab.o1.replace(FOREIGN.replace("device float* scores", "device half* scores"))
    assert str(caught.value) == (
        "Kernel 'o1c_land' does not fit o1: buffer(2) 'scores' is device half*, but 'fs' holds float32. "
        "Its buffers in o1 are 0 device const float* q, 1 device const float* k_tilde, 2 device float* fs, "
        "3 constant OC& u."
    )


def test_the_module_speaks_of_a_default_session() -> None:
    state, q, k, v = lab.o1.example(SIZES, 12)
    other = lab.o1.session()
    lab.o1.replace(FOREIGN.replace("p.sc * sum", "NAN"))
    assert list(lab.o1.default_session().replaced) == ["o1c_land"] and not other.replaced
    found = lab.o1.trace(state, q, k, v).first_deviation()
    assert found is not None and found.kernel == "o1c_land"
    (compared,) = lab.o1.compare(state, q, k, v)
    assert compared.kernel == "o1c_land" and compared.deviation == np.inf
    assert other.trace(state, q, k, v).first_deviation() is None
    assert lab.o1.restore("o1c_land") == ("o1c_land",)
    assert lab.o1.trace(state, q, k, v).first_deviation() is None


def test_a_replaced_kernel_is_compared_with_the_shipped_one() -> None:
    state, q, k, v = lab.o1.example(SIZES, 20)
    session = lab.o1.session()
    session.replace(FOREIGN)
    (found,) = session.compare(state, q, k, v, chunks=9)
    assert found.elements == 20 * SIZES.nh * SIZES.m
    assert 0 < found.differing < found.elements  # another order of the sum
    assert max(found.deviation, found.shipped_deviation) < 1e-6
