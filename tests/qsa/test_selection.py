"""Sorting and radix select choose the same cells, whatever the scores; the cut is told as it is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lab.errors import ArgumentError
from lab.qsa.selection import Selection, block_cells, chosen, okey, score_of, selection

BUDGET = 2051
DENORMAL = 2.0**-149  # the least
FLOATS = st.floats(width=32, allow_nan=False)
# Few values, so that there are ties; among them neighbours, and zeros of both signs.
FEW = st.sampled_from([0.0, -0.0, DENORMAL, -DENORMAL, 1.0, 1.0 + 2.0**-23, -1.0, np.inf, -np.inf])


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, int, int]:
    """Scores, cells, budget: any, with more cells than budget more often than not."""
    n_kv = draw(st.integers(1, 120))
    budget = draw(st.integers(1, max(1, n_kv + 2)))
    values = draw(st.sampled_from([FLOATS, FEW, st.sampled_from([1.0, 2.0])]))
    blocks = n_kv // 4 + 1
    return np.array(draw(st.lists(values, min_size=blocks, max_size=blocks)), np.float32), n_kv, budget


def written_out(scores: np.ndarray, n_kv: int, budget: int) -> list[int]:
    """The rule, one block after the other."""
    if n_kv <= budget:
        return list(range(n_kv))
    cells: list[int] = []
    for block in sorted(range(-(-n_kv // 4)), key=lambda b: (-float(scores[b]), b)):
        cells += range(4 * block, min(4 * block + 4, n_kv))
    return sorted(cells[:budget])


def check(scores: np.ndarray, n_kv: int, budget: int) -> Selection:
    """Both ways agree with the rule and each other, and the cut is consistent with the cells."""
    found = selection(scores, n_kv, budget)
    wanted = written_out(scores, n_kv, budget)
    assert chosen(scores, n_kv, budget).tolist() == wanted
    assert found.ids.tolist() == wanted
    assert found.ids.dtype == chosen(scores, n_kv, budget).dtype == np.int32
    assert (found.n_kv, found.budget, found.everything) == (n_kv, budget, n_kv <= budget)
    if found.cut is not None:
        check_cut(found, scores)
    return found


def check_cut(found: Selection, scores: np.ndarray) -> None:
    cut, n_kv, budget = found.cut, found.n_kv, found.budget
    assert cut is not None
    cells = block_cells(n_kv)
    scores = np.asarray(scores, np.float32)[: len(cells)]
    of_block = np.bincount(found.ids // 4, minlength=len(cells))
    assert cut.above.tolist() == np.flatnonzero(scores > np.float32(cut.score)).tolist()
    assert cut.ties.tolist() == np.flatnonzero(scores == np.float32(cut.score)).tolist()
    taken = cut.ties[: cut.ties_taken]
    assert np.flatnonzero(of_block).tolist() == sorted([*cut.above, *taken])
    assert cut.last_block == taken[-1]
    assert cut.cells_above == cells[cut.above].sum() < budget
    kept = cells[cut.last_block] - len(cut.cells_cut)
    assert cut.cells_above + cells[taken[:-1]].sum() + kept == budget
    assert kept == of_block[cut.last_block] >= 1
    end = min(4 * cut.last_block + 4, n_kv)
    assert cut.cells_cut.tolist() == list(range(end - len(cut.cells_cut), end))
    left = np.flatnonzero(of_block == 0)
    if len(left):
        best = scores[left].max()
        assert cut.next_block == left[scores[left] == best][0]
        assert cut.next_score == best
        assert cut.margin == (0.0 if best == cut.score else float(cut.score) - float(best))
        assert (cut.margin == 0) == (cut.ties_taken < len(cut.ties))
    else:
        assert cut.next_block is cut.next_score is cut.margin is None
    check_passes(found, scores, cells)


def check_passes(found: Selection, scores: np.ndarray, cells: np.ndarray) -> None:
    cut = found.cut
    assert cut is not None
    assert [p.shift for p in cut.passes] == [24, 16, 8, 0]
    assert score_of(cut.key) == cut.score
    assert int(okey(cut.score)) == cut.key
    keys, wanted = [int(key) for key in okey(scores)], found.budget
    for number, one in enumerate(cut.passes):
        assert one.prefix == cut.key >> (one.shift + 8)
        assert one.digit == cut.key >> one.shift & 255
        assert one.wanted == wanted
        counts = [0] * 256
        for key, weight in zip(keys, cells, strict=True):
            if key >> (one.shift + 8) == one.prefix:
                counts[key >> one.shift & 255] += int(weight)
        assert one.histogram.tolist() == counts
        assert one.at_or_above.tolist() == [sum(counts[digit:]) for digit in range(256)]
        assert one.cells_above < wanted <= one.at_or_above[one.digit], number
        wanted = one.still_wanted
        assert wanted == one.wanted - sum(counts[one.digit + 1 :])
    assert wanted == found.budget - cut.cells_above


# ---- keys ----------------------------------------------------------------------------------------------


@given(FLOATS, FLOATS)
@example(0.0, -0.0)
@example(DENORMAL, 0.0)
@example(-DENORMAL, -0.0)
@example(np.inf, 3.4028234663852886e38)
@example(-np.inf, -3.4028234663852886e38)
def test_keys_are_in_the_order_of_the_scores(a: float, b: float) -> None:
    first, second = (int(key) for key in okey(np.array([a, b])))
    assert (first < second, first == second) == (a < b, a == b)
    assert score_of(first) == a


def test_known_keys() -> None:
    scores = [-np.inf, -1.0, -DENORMAL, -0.0, 0.0, DENORMAL, 1.0, np.inf]
    keys = [0x007FFFFF, 0x407FFFFF, 0x7FFFFFFE, 0x80000000, 0x80000000, 0x80000001, 0xBF800000, 0xFF800000]
    assert okey(scores).tolist() == keys
    assert okey(scores).dtype == np.uint32


# ---- selections ----------------------------------------------------------------------------------------


@settings(deadline=None)
@given(cases())
def test_sorting_and_radix_select_agree_on_any_scores(case: tuple[np.ndarray, int, int]) -> None:
    check(*case)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.sampled_from([1.0, 4.0, 1e4]))
def test_they_agree_over_many_blocks(seed: int, different: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    n_kv = int(rng.integers(BUDGET - 4, 20000))
    scores = spread * rng.standard_normal(n_kv // 4 + 1)
    few = rng.choice(scores, different)
    check(np.where(rng.random(len(scores)) < 0.5, scores, rng.choice(few, len(scores))), n_kv, BUDGET)


@pytest.mark.parametrize("budget", [BUDGET, 2048, 2049, 2050, 64, 5, 4, 3, 1])
@pytest.mark.parametrize("beyond", range(-1, 6))
def test_every_edge_of_the_budget(rng: np.random.Generator, budget: int, beyond: int) -> None:
    n_kv = budget + beyond
    if n_kv < 1:
        return
    scores = rng.standard_normal(n_kv // 4 + 1).astype(np.float32)
    found = check(scores, n_kv, budget)
    assert len(found.ids) == min(n_kv, budget)
    scores[n_kv // 4] = np.inf if n_kv & 3 else -np.inf  # as they come from qsa_score
    found = check(scores, n_kv, budget)
    if n_kv & 3 and budget >= 3:
        assert set(range(n_kv & ~3, n_kv)) <= set(found.ids.tolist())


@pytest.mark.parametrize("unfinished", range(4))
def test_the_unfinished_block_counts_for_its_cells(unfinished: int) -> None:
    n_kv = 40 + unfinished
    scores = np.arange(11, dtype=np.float32)  # the unfinished block, 10, is the best
    found = check(scores, n_kv, 11)
    newest = list(range(40, n_kv))
    whole = 11 - unfinished
    wanted = [4 * (9 - i // 4) + i % 4 for i in range(whole)]
    assert found.ids.tolist() == sorted(wanted + newest)
    # Where it has no cells its score is nothing, be it the best or among the ties.
    if unfinished == 0:
        for score in (np.inf, -np.inf, 9.0, 7.0):
            scores[10] = score
            again = check(scores, n_kv, 11)
            assert again.ids.tolist() == found.ids.tolist()
            assert again.cut is not None and 10 not in [*again.cut.above, *again.cut.ties]


def test_a_budget_without_an_unfinished_block_ends_within_the_513th() -> None:
    found = check(-np.arange(1001, dtype=np.float32), 4000, BUDGET)
    assert found.ids.tolist() == list(range(BUDGET))
    assert found.cut is not None
    assert (found.cut.last_block, found.cut.cells_cut.tolist()) == (512, [2051])


ADVERSARIAL = {
    "all equal": lambda n: np.full(n, 1.5),
    "all -infinity": lambda n: np.full(n, -np.inf),
    "all infinity": lambda n: np.full(n, np.inf),
    "all but one equal, that better": lambda n: np.where(np.arange(n) == n - 2, 2.0, 1.0),
    "all but one equal, that worse": lambda n: np.where(np.arange(n) == 3, 1.0, 2.0),
    "denormals": lambda n: ((np.arange(n) * 37) % 101 - 50) * DENORMAL,
    "zeros of both signs": lambda n: np.where(np.arange(n) % 3 == 0, -0.0, 0.0),
    "zeros and denormals": lambda n: np.choose(np.arange(n) % 4, [0.0, -0.0, DENORMAL, -DENORMAL]),
    "infinities and numbers": lambda n: np.choose(np.arange(n) % 3, [-np.inf, 0.0, np.inf]),
    "largest numbers": lambda n: np.where(np.arange(n) % 2, 3.4028235e38, -3.4028235e38),
    "ascending": lambda n: np.arange(n),
    "descending": lambda n: -np.arange(n),
}


@pytest.mark.parametrize("n_kv", [2052, 2053, 2054, 2055, 4096, 20003])
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_adversarial_scores(name: str, n_kv: int) -> None:
    check(ADVERSARIAL[name](n_kv // 4 + 1).astype(np.float32), n_kv, BUDGET)


@pytest.mark.parametrize("sign", [0, 1 << 31])
@pytest.mark.parametrize("byte", range(4))
def test_scores_that_differ_in_one_byte_only(rng: np.random.Generator, byte: int, sign: int) -> None:
    varied = rng.integers(0, 127 if byte == 3 else 256, 1001).astype(np.uint32) << np.uint32(8 * byte)
    bits = np.uint32(sign) | (np.uint32(0x3F3F3F3F) & ~np.uint32(0xFF << 8 * byte)) | varied
    found = check(bits.view(np.float32), 4003, BUDGET)
    assert found.cut is not None
    # Only the pass of that byte tells blocks apart.
    apart = [len(np.flatnonzero(p.histogram)) > 1 for p in found.cut.passes]
    assert apart == [byte == of_pass for of_pass in (3, 2, 1, 0)]


def test_a_cut_in_known_numbers() -> None:
    scores = [5.0, 1.0, 3.0, 1.0, 9.0, 1.0, 0.5]
    found = check(np.array(scores, np.float32), 26, 18)
    cut = found.cut
    assert cut is not None
    assert (cut.score, cut.above.tolist(), cut.cells_above) == (1.0, [0, 2, 4], 12)
    assert (cut.ties.tolist(), cut.ties_taken, cut.last_block) == ([1, 3, 5], 2, 3)
    assert cut.cells_cut.tolist() == [14, 15]
    assert (cut.next_block, cut.margin) == (5, 0.0)
    found = check(np.array(scores, np.float32), 26, 22)
    cut = found.cut
    assert cut is not None
    assert (cut.ties_taken, cut.cells_cut.tolist()) == (3, [22, 23])
    assert (cut.next_block, cut.next_score, cut.margin) == (6, 0.5, 0.5)


def test_where_every_block_is_taken_there_is_no_margin() -> None:
    cut = check(np.array([2.0, 1.0], np.float32), 8, 7).cut
    assert cut is not None
    assert (cut.next_block, cut.margin, cut.cells_cut.tolist()) == (None, None, [7])


@pytest.mark.parametrize("select", [chosen, selection])
def test_nan_is_refused_where_it_would_be_read(select) -> None:
    scores = np.arange(12, dtype=np.float32)
    scores[[7, 9]] = np.nan
    for n_kv in (28, 30, 40):
        with pytest.raises(ArgumentError, match=r"score of block 7 is NaN"):
            select(scores, n_kv, 8)
    select(scores, 27, 8)
    select(scores, 40, 40)  # all cells: no score is read


@pytest.mark.parametrize("select", [chosen, selection])
def test_too_few_scores_are_refused(select) -> None:
    with pytest.raises(ArgumentError, match="41 cells are 11 blocks, but there are 10 scores"):
        select(np.zeros(10, np.float32), 41, 8)
    select(np.zeros(10, np.float32), 40, 8)


@pytest.mark.parametrize("select", [chosen, selection])
def test_a_budget_of_nothing_is_refused(select) -> None:
    with pytest.raises(ArgumentError, match="A budget of 0 cells"):
        select(np.zeros(3, np.float32), 8, 0)
