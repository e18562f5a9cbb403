"""Which cells a token attends to, and how the cut between them and all others is found.

Blocks are taken by score, best first, equal scores by lower index first, until the budget is spent; the last
one taken is cut at the budget and keeps its lowest cells. ``chosen`` says so by sorting. ``selection`` finds
the same as a radix select does, digit by digit of keys whose order is that of the scores, and keeps what it
went through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ArgumentError

__all__ = ["Cut", "RadixPass", "Selection", "block_cells", "chosen", "okey", "score_of", "selection"]

Array = np.ndarray

BLOCK = 4  # cells
DIGIT_BITS = 8
SHIFTS = (24, 16, 8, 0)  # of a key's digits, in the order of the passes
_SIGN = 1 << 31
_ALL = (1 << 32) - 1


@dataclass(frozen=True)
class RadixPass:
    """One of the four passes of a radix select over keys of 32 bits: it finds the digit at ``shift``.

    ``prefix`` is what the passes before found, the threshold's bits above the digit. Of the blocks whose keys
    have it, ``histogram`` [256] counts the cells by digit, and ``at_or_above`` [256] those with that digit or
    a greater one. ``digit`` is the greatest at or above which there are the ``wanted`` cells.
    """

    shift: int
    prefix: int
    histogram: Array
    at_or_above: Array
    digit: int
    wanted: int

    @property
    def cells_above(self) -> int:
        """Cells with the prefix and a greater digit: all of them are chosen."""
        return int(self.at_or_above[self.digit + 1]) if self.digit < 255 else 0

    @property
    def still_wanted(self) -> int:
        """Cells wanted from those that have the prefix and the digit: at least one."""
        return self.wanted - self.cells_above


@dataclass(frozen=True)
class Cut:
    """Where a selection ends: at the threshold, the key and the score of the last block taken.

    The blocks ``above`` have greater scores and are taken whole: ``cells_above`` cells. Those that have the
    score itself are ``ties`` (one or more); the first ``ties_taken`` of them are taken, and of the last of
    these, ``last_block``, only the lowest cells: ``cells_cut`` are left out. ``next_block`` is the best one
    of which nothing is taken, None where there is none. Blocks and cells are given by number, ascending,
    int64.
    """

    key: int
    score: float
    passes: tuple[RadixPass, ...]
    above: Array
    cells_above: int
    ties: Array
    ties_taken: int
    last_block: int
    cells_cut: Array
    next_block: int | None
    next_score: float | None

    @property
    def margin(self) -> float | None:
        """By how much the score of the cut exceeds ``next_score``: 0 in a tie; None without a next block."""
        if self.next_score is None:
            return None
        # Equal infinities are a tie too.
        return 0.0 if self.next_score == self.score else self.score - self.next_score


@dataclass(frozen=True)
class Selection:
    """The cells that one token attends to: ``ids``, int32, ascending.

    The token sees ``n_kv`` cells and may attend to ``budget`` of them. ``cut`` is None where it attends to
    every cell it sees.
    """

    n_kv: int
    budget: int
    ids: Array
    cut: Cut | None

    @property
    def everything(self) -> bool:
        """Whether the token attends to every cell it sees."""
        return self.cut is None


def okey(scores: Any) -> Array:
    """Keys in the order of float32 scores, uint32: a larger score has a larger key, -0.0 that of 0.0.

    They are the scores' bits, with the sign bit set, or, of negative scores, inverted. NaN has no place in
    the order.
    """
    bits = (np.asarray(scores, np.float32) + np.float32(0)).view(np.uint32)  # -0.0 + 0.0 is 0.0
    return np.where(bits & np.uint32(_SIGN), ~bits, bits | np.uint32(_SIGN))


def score_of(key: int) -> float:
    """The score that has this key."""
    bits = key ^ _SIGN if key & _SIGN else key ^ _ALL
    return float(np.uint32(bits).view(np.float32))


def block_cells(n_kv: int) -> Array:
    """The cells of each block that has any, int64: 4, and those of the unfinished block."""
    cells = np.full(-(-n_kv // BLOCK), BLOCK)
    if n_kv % BLOCK:
        cells[-1] = n_kv % BLOCK
    return cells


def chosen(scores: Any, n_kv: int, budget: int) -> Array:
    """The cells that a token attends to, by the definition: int32 [min(n_kv, budget)], ascending.

    ``scores`` are float32, one for each block; the token sees ``n_kv`` cells. Raises ArgumentError for NaN
    among the scores that are read, where there are too few, and for a budget below 1.
    """
    if n_kv <= budget:
        return np.arange(n_kv, dtype=np.int32)
    cells = block_cells(n_kv)
    order = np.argsort(-_read(scores, n_kv, budget)[: len(cells)], kind="stable")
    cells = cells[order]
    spent = np.cumsum(cells) - cells
    kept = np.clip(budget - spent, 0, cells)
    lane = np.arange(BLOCK)
    ids = (BLOCK * order[:, None] + lane)[lane < kept[:, None]]
    return np.sort(ids).astype(np.int32)


def selection(scores: Any, n_kv: int, budget: int) -> Selection:
    """What ``chosen`` chooses, found by radix select, with the passes and the cut. Raises as it does."""
    if n_kv <= budget:
        return Selection(n_kv, budget, np.arange(n_kv, dtype=np.int32), None)
    cells = block_cells(n_kv)
    keys = okey(_read(scores, n_kv, budget)[: len(cells)])
    passes = _passes(keys, cells, budget)
    key = passes[-1].prefix << DIGIT_BITS | passes[-1].digit
    wanted = passes[-1].still_wanted

    above, ties = np.flatnonzero(keys > key), np.flatnonzero(keys == key)
    reached = np.cumsum(cells[ties])
    last = int(np.searchsorted(reached, wanted))  # the first with which there are enough
    block, too_many = int(ties[last]), int(reached[last]) - wanted
    end = BLOCK * block + int(cells[block])
    left = ties[last + 1 :] if last + 1 < len(ties) else np.flatnonzero(keys < key)
    after = int(left[np.argmax(keys[left])]) if len(left) else None
    cut = Cut(
        key=key,
        score=score_of(key),
        passes=passes,
        above=above,
        cells_above=int(cells[above].sum()),
        ties=ties,
        ties_taken=last + 1,
        last_block=block,
        cells_cut=np.arange(end - too_many, end),
        next_block=after,
        next_score=None if after is None else score_of(int(keys[after])),
    )
    taken = np.zeros(len(keys), bool)
    taken[above] = taken[ties[: last + 1]] = True
    picked = np.repeat(taken, cells)
    picked[cut.cells_cut] = False
    return Selection(n_kv, budget, np.flatnonzero(picked).astype(np.int32), cut)


def _passes(keys: Array, cells: Array, budget: int) -> tuple[RadixPass, ...]:
    found: list[RadixPass] = []
    prefix, wanted = 0, budget
    for shift in SHIFTS:
        # As 64 bits, since the first pass shifts by 32.
        inside = keys.astype(np.uint64) >> np.uint64(shift + DIGIT_BITS) == prefix
        digits = keys[inside] >> np.uint32(shift) & np.uint32(255)
        histogram = np.bincount(digits, cells[inside], 256).astype(np.int64)
        at_or_above = np.cumsum(histogram[::-1])[::-1]
        digit = int(np.flatnonzero(at_or_above >= wanted)[-1])
        found.append(RadixPass(shift, prefix, histogram, at_or_above, digit, wanted))
        prefix, wanted = prefix << DIGIT_BITS | digit, found[-1].still_wanted
    return tuple(found)


def _read(scores: Any, n_kv: int, budget: int) -> Array:
    """The scores of blocks 0 to ``n_kv >> 2``, that of an unfinished block without cells included."""
    if budget < 1:
        raise ArgumentError(f"A budget of {budget} cells chooses nothing: it has to be 1 or more.")
    read = n_kv // BLOCK + 1
    found, blocks = np.asarray(scores, np.float32).reshape(-1)[:read], -(-n_kv // BLOCK)
    if len(found) < blocks:
        raise ArgumentError(f"{n_kv} cells are {blocks} blocks, but there are {len(found)} scores.")
    bad = np.flatnonzero(np.isnan(found))
    if len(bad):
        raise ArgumentError(f"The score of block {bad[0]} is NaN: such scores have no order to select by.")
    return found
