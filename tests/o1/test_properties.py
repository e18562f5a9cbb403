"""What holds of o1 for all sizes, chunkings, paths and seeds, looked for by hypothesis."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import note
from hypothesis import strategies as st

import lab
import lab.o1
from lab.o1 import Sizes, State, reference
from tests.properties import for_all

TOLERANCE = 2e-6  # of the largest output


# ---- what is drawn -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layer and a sequence for it: ``steps`` are the chunks, each with its path."""

    sizes: Sizes
    steps: tuple[tuple[str, int], ...]
    mixing: str
    seed: int

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.steps)

    @property
    def how(self) -> dict[str, Any]:
        """The steps as ``run`` takes them."""
        return {"chunks": [rows for _, rows in self.steps], "path": [path for path, _ in self.steps]}

    def layer(self) -> tuple[State, np.ndarray, np.ndarray, np.ndarray]:
        """A fresh state, q [rows][nh][d], k and v [rows][ng][d]: normal random data."""
        z, rng = self.sizes, np.random.default_rng(self.seed)
        sinks = [normal(rng, z.ng, z.ns, z.d) for _ in range(2)]
        state = State.fresh(
            z, normal(rng, z.ng, z.m, z.d), normal(rng, z.nh, z.m, z.d), mixing(rng, z, self.mixing), *sinks
        )
        q = normal(rng, self.rows, z.nh, z.d)
        return state, q, normal(rng, self.rows, z.ng, z.d), normal(rng, self.rows, z.ng, z.d)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


NON_NEGATIVE = ("positive", "sparse", "diagonal", "zero")


def mixing(rng: np.random.Generator, z: Sizes, kind: str) -> np.ndarray:
    """mu [nh][m][m]."""
    mu = rng.uniform(0.0, 1.0 / z.m, (z.nh, z.m, z.m)).astype(np.float32)
    if kind == "sparse":
        mu[rng.random(mu.shape) < 0.7] = 0
    elif kind == "diagonal":
        mu *= np.eye(z.m, dtype=np.float32)
    elif kind == "zero":
        mu[:] = 0
    elif kind == "signed":
        mu -= np.float32(0.5 / z.m)
    return mu


def takes_tokens(sizes: Sizes) -> bool:
    return sizes.hpg <= 4 and sizes.d in (128, 256)


@st.composite
def all_sizes(draw: st.DrawFn, tokens: bool | None = None, widest: int = 40) -> Sizes:
    """Sizes within the limits; of a layer that the token path takes (True), or of any (None)."""
    tokens = draw(st.booleans()) if tokens is None else tokens
    ng, w = draw(st.integers(1, 3)), draw(st.integers(1, widest))
    d = draw(st.sampled_from([128, 256] if tokens else [4, 8, 12, 20, 64, 128]))
    return Sizes(
        ng=ng,
        hpg=draw(st.integers(1, 4 if tokens else 8)),
        d=d,
        w=w,
        ns=draw(st.integers(0, 5)),
        m=draw(st.one_of(st.integers(1, 32), st.sampled_from([1, 31, 32]))),
        windows=draw(st.one_of(st.none(), st.tuples(*[st.integers(0, w)] * ng))),
        scale=draw(st.sampled_from([0.5, 1.0, 1.5])) * d**-0.5,
    )


@st.composite
def steps_of(draw: st.DrawFn, sizes: Sizes, rows: int) -> tuple[tuple[str, int], ...]:
    """``rows`` rows in chunks that ``sizes`` allow, any path for each: a few steps over and over."""
    longest = st.integers(1, sizes.longest_chunk)
    step = st.one_of(
        st.tuples(st.just("chunk"), longest),
        st.tuples(st.just("matmul"), longest),
        *([st.just(("token", 1))] if takes_tokens(sizes) else []),
    )
    left, steps = rows, []
    for path, count in itertools.cycle(draw(st.lists(step, min_size=1, max_size=6))):
        if not left:
            return tuple(steps)
        steps.append((path, min(count, left)))
        left -= steps[-1][1]
    raise AssertionError("a cycle has no end")


seeds = st.integers(0, 2**32 - 1)


@st.composite
def cases(
    draw: st.DrawFn, kinds: tuple[str, ...] = NON_NEGATIVE, tokens: bool | None = None, laps: int = 0
) -> Case:
    """A layer and a sequence that goes around its largest ring ``laps`` times at least."""
    sizes = draw(all_sizes(tokens, widest=24 if laps else 40))
    widest = max(sizes.window(g) for g in range(sizes.ng))
    least = laps * widest + 1
    rows = draw(st.integers(least, max(least, (laps + 1) * widest) + 20))
    return Case(sizes, draw(steps_of(sizes, rows)), draw(st.sampled_from(kinds)), draw(seeds))


# ---- what is compared ----------------------------------------------------------------------------------


@functools.cache
def session(guarded: bool) -> lab.o1.Session:
    return lab.o1.session(guarded=guarded or None)


def off(out: Any, exact: np.ndarray) -> float:
    """Largest deviation, as a share of the largest output; NaN is one."""
    found = np.abs(np.asarray(out, np.float64) - exact).max() / np.abs(exact).max()
    return float(np.nan_to_num(found, nan=np.inf))


def check_ring(state: State, k: np.ndarray, v: np.ndarray) -> None:
    """``meta`` and ring are what the definition says after tokens ``k``, ``v`` [n][ng][d] and no others."""
    z, n = state.sizes, len(k)
    meta = np.zeros((z.ng, 4), np.uint32)
    rings = np.zeros((2, z.ng, z.w, z.d), np.float32)
    for g in range(z.ng):
        window = z.window(g)
        kept = min(window, n)
        meta[g] = kept, (n - kept) % window, n - kept, z.windows[g] if z.windows else 0
        for token in range(n - kept, n):
            rings[:, g, token % window] = k[token, g], v[token, g]
    np.testing.assert_array_equal(state.meta, meta)
    np.testing.assert_array_equal(state.ring_k, rings[0])
    np.testing.assert_array_equal(state.ring_v, rings[1])


def far_field(state: State) -> tuple[np.ndarray, np.ndarray]:
    """exp(M) z [nh][m] and exp(M) t [nh][m][d] in float64, which no order of evictions changes."""
    mz, m = np.asarray(state.mz, np.float64), state.sizes.m
    unit = np.exp(mz[:, :m])
    return unit * mz[:, m:], unit[..., None] * np.asarray(state.t_hat, np.float64)


def check_far_field(state: State) -> None:
    """``mz`` and ``t_hat`` are the sums over all evicted tokens, taken one by one, to rounding."""
    z, history = state.sizes, state.history
    masses, sums = far_field(state)
    for head in range(z.nh):
        group = head // z.hpg
        gone = max(0, history.pushed - z.window(group))
        keys, values = (x[group, :gone].astype(np.float64) for x in (history.keys, history.values))
        weights = np.exp(history.scale * history.q_tilde[head].astype(np.float64) @ keys.T)
        np.testing.assert_allclose(masses[head], weights.sum(-1), rtol=2e-5)
        np.testing.assert_array_less(
            np.abs(sums[head] - weights @ values), 2e-5 * (weights @ np.abs(values)) + 1e-30
        )


# ---- the definition ------------------------------------------------------------------------------------


@for_all(25, 600, case=cases(), guarded=st.booleans())
def test_any_sequence_gives_the_definition(case: Case, guarded: bool) -> None:
    state, q, k, v = case.layer()
    exact = reference.attention(state.history, q, k, v)
    out = session(guarded).run(state, q, k, v, **case.how)
    assert off(out, exact) <= TOLERANCE
    check_ring(state, k, v)
    check_far_field(state)


@for_all(15, 300, case=cases(laps=4))
def test_a_ring_wrapped_several_times_gives_the_definition(case: Case) -> None:
    state, q, k, v = case.layer()
    exact = reference.attention(state.history, q, k, v)
    assert off(lab.o1.run(state, q, k, v, **case.how), exact) <= TOLERANCE
    check_ring(state, k, v)
    check_far_field(state)
    assert all(far >= 3 * case.sizes.window(g) for g, far in enumerate(np.asarray(state.meta)[:, 2]))


@for_all(15, 300, case=cases((*NON_NEGATIVE, "signed")))
def test_meta_and_ring_are_exact_after_every_chunk(case: Case) -> None:
    state, q, k, v = case.layer()
    whole = state.copy()
    outs, done = [], 0
    for path, rows in case.steps:
        part = slice(done, done + rows)
        outs.append(np.asarray(lab.o1.run(state, q[part], k[part], v[part], chunks=rows, path=path)))
        done += rows
        check_ring(state, k[:done], v[:done])
        assert state.tokens == state.history.pushed == done
    # One run of the same chunks does the same, to the bit.
    np.testing.assert_array_equal(np.concatenate(outs), lab.o1.run(whole, q, k, v, **case.how))
    for name, array in state.arrays.items():
        np.testing.assert_array_equal(array, whole.arrays[name])


# ---- one against the other -----------------------------------------------------------------------------


@for_all(15, 300, case=cases(), data=st.data())
def test_chunking_does_not_matter(case: Case, data: st.DataObject) -> None:
    other = data.draw(steps_of(case.sizes, case.rows))
    state, q, k, v = case.layer()
    again = state.copy()
    first = np.asarray(lab.o1.run(state, q, k, v, **case.how))
    how = {"chunks": [rows for _, rows in other], "path": [path for path, _ in other]}
    assert off(lab.o1.run(again, q, k, v, **how), first) <= TOLERANCE
    for name in ("meta", "ring_k", "ring_v"):
        np.testing.assert_array_equal(state.arrays[name], again.arrays[name])


@for_all(10, 200, case=cases(tokens=True))
def test_all_three_paths_agree_to_rounding(case: Case) -> None:
    start, q, k, v = case.layer()
    longest = case.sizes.longest_chunk
    outs = []
    for path, rows in (("token", 1), ("chunk", 1), ("matmul", 1), ("chunk", longest), ("matmul", longest)):
        state = start.copy()
        outs.append(np.asarray(lab.o1.run(state, q, k, v, chunks=rows, path=path)))
        check_ring(state, k, v)
        check_far_field(state)
    for a, b in itertools.combinations(range(len(outs)), 2):
        note(f"{a} {b}")
        assert off(outs[a], outs[b]) <= TOLERANCE


# ---- limits --------------------------------------------------------------------------------------------


def sentences(text: str) -> int:
    return len(re.findall(r"\.(?:\s|$)", text))


# Values beyond the limit of a size.
BEYOND = {
    "hpg": st.one_of(st.integers(9, 1000), st.integers(-1000, 0)),
    "m": st.one_of(st.integers(33, 1000), st.integers(-1000, 0)),
    "d": st.one_of(st.integers(5, 1000).filter(lambda d: d % 4), st.sampled_from([0, -4])),
    "ng": st.integers(-1000, 0),
    "w": st.integers(-1000, 0),
    "ns": st.integers(-1000, -1),
}


@for_all(60, 2000, sizes=all_sizes(), names=st.sets(st.sampled_from(sorted(BEYOND)), min_size=1),
         data=st.data())  # fmt: skip
def test_every_violated_limit_of_the_sizes_has_one_sentence(
    sizes: Sizes, names: set[str], data: st.DataObject
) -> None:
    wrong = {name: data.draw(BEYOND[name], label=name) for name in sorted(names)}
    right = {name: getattr(sizes, name) for name in ("ng", "hpg", "d", "w", "ns", "m")}
    with pytest.raises(lab.ArgumentError) as caught:
        Sizes(**{**right, **wrong})
    told = str(caught.value)
    assert sentences(told) == len(wrong)
    for name, value in wrong.items():
        assert len(re.findall(rf"(?:^|\. ){name} = {value} ", told)) == 1


@for_all(40, 1000, sizes=all_sizes(), path=st.sampled_from(["chunk", "matmul"]), data=st.data())
def test_a_chunk_larger_than_the_smallest_window_is_refused_in_one_sentence(
    sizes: Sizes, path: str, data: st.DataObject
) -> None:
    smallest = sizes.smallest_window
    k = data.draw(st.integers(smallest + 1, 64))
    state, *rows = lab.o1.example(sizes, k)
    before = {name: np.asarray(array).copy() for name, array in state.arrays.items()}
    for refused in (
        lambda: sizes.check_chunk(k, path),
        lambda: lab.o1.plan(sizes, path, k),
        lambda: lab.o1.plans(sizes, k, k, path),
        lambda: lab.o1.run(state, *rows, chunks=k, path=path),
    ):
        with pytest.raises(lab.ArgumentError) as caught:
            refused()
        told = str(caught.value)
        assert sentences(told) == 1
        assert f"A chunk of {k} rows is longer than the window of {smallest} tokens of group " in told
    assert state.tokens == 0
    for name, array in before.items():
        np.testing.assert_array_equal(state.arrays[name], array)
    lab.o1.plan(sizes, path, smallest)  # the limit itself is allowed


@for_all(40, 1000, sizes=all_sizes(), k=st.integers(1, 3))
def test_every_limit_of_the_token_path_has_one_sentence(sizes: Sizes, k: int) -> None:
    expected = {
        "takes 1 row": k > 1,
        "takes hpg up to 4": sizes.hpg > 4,
        "takes d = 128 or 256": sizes.d not in (128, 256),
        "longer than the window": k > sizes.smallest_window,
    }
    if not any(expected.values()):
        lab.o1.plan(sizes, "token", k)
        return
    with pytest.raises(lab.ArgumentError) as caught:
        lab.o1.plan(sizes, "token", k)
    told = str(caught.value)
    assert {what: what in told for what in expected} == expected
    assert sentences(told) == sum(expected.values())
