"""What a trace says of a token's selection and attention: scores, the cut, the cells, the shares of chunks.

Everything is read at a position: after the first so many dispatches. A token whose call has not come to it
yet has NaN where numbers will be and None for a list, one whose call is over has what the call left. What
broken kernels wrote is told as it is; where nothing follows from it there is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ArgumentError
from ..systems import Step, Trace
from .reference import Quantised
from .selection import BLOCK, Selection, block_cells, selection
from .sizes import Sizes

__all__ = [
    "Cellweights",
    "Chosen",
    "Masses",
    "arguments_words",
    "cell_weights",
    "chosen",
    "chunk_masses",
    "cut_words",
    "list_words",
    "needle_words",
    "position_of",
    "selection_words",
]

Array = np.ndarray

TOLD = 8  # cells that a sentence lists

_SILENTLY = np.errstate(all="ignore")  # what comes of rubbish is NaN


@dataclass(frozen=True)
class Chosen:
    """Which cells a token attends to, by the kernel and by the reference.

    ``token`` is its row of the sequence; it sees ``n_kv`` cells and may attend to ``budget``. ``scores``,
    float32 [blocks], are those that were written for the blocks that have cells (NaN: not yet);
    ``reference_scores``, float64, what should be there. ``selection`` follows from ``scores`` (None where
    they have no order yet); ``kernel_ids`` is what the kernel listed, as it stands there, int32
    [min(n_kv, budget)], None before it did. ``needles`` are cells with what the token looks for, if such are
    known.
    """

    token: int
    n_kv: int
    budget: int
    scores: Array
    reference_scores: Array
    selection: Selection | None
    kernel_ids: Array | None
    needles: tuple[int, ...] = ()

    @property
    def hits(self) -> Array:
        """Cells, ascending, that are in both lists; none without both."""
        return np.intersect1d(*self._both)

    @property
    def misses(self) -> Array:
        """Cells, ascending, that the kernel should have listed and did not."""
        kernel, reference = self._both
        return np.setdiff1d(reference, kernel)

    @property
    def extras(self) -> Array:
        """Cells that the token sees, ascending, that the kernel listed and should not have."""
        kernel, reference = self._both
        return np.setdiff1d(kernel[(kernel >= 0) & (kernel < self.n_kv)], reference)

    @property
    def strays(self) -> Array:
        """Numbers that the kernel listed and that are no cells which the token sees; entries that it left
        out are among them. In the order of the list."""
        ids = self.kernel_ids if self.kernel_ids is not None else np.empty(0, np.int32)
        return ids[(ids < 0) | (ids >= self.n_kv)]

    @property
    def agrees(self) -> bool:
        """Whether both lists are there and the same, element for element."""
        return (
            self.kernel_ids is not None
            and self.selection is not None
            and np.array_equal(self.kernel_ids, self.selection.ids)
        )

    @property
    def ties(self) -> Array:
        """The cells, ascending, of all blocks that have the score of the cut: one block at least where there
        is a cut."""
        cut = self.selection.cut if self.selection is not None else None
        if cut is None:
            return np.empty(0, np.int64)
        cells = (BLOCK * cut.ties[:, None] + np.arange(BLOCK)).reshape(-1)
        return cells[cells < self.n_kv]

    @property
    def needles_found(self) -> tuple[int, ...]:
        """The needles that the kernel listed."""
        return self._needles(listed=True)

    @property
    def needles_lost(self) -> tuple[int, ...]:
        """The needles that the kernel did not list; none before it has listed anything."""
        return self._needles(listed=False)

    def _needles(self, *, listed: bool) -> tuple[int, ...]:
        if self.kernel_ids is None:
            return ()
        mine = set(self.kernel_ids.tolist())
        return tuple(cell for cell in self.needles if (cell in mine) == listed)

    @property
    def _both(self) -> tuple[Array, Array]:
        """The kernel's list and the reference's; both empty without either."""
        if self.kernel_ids is None or self.selection is None:
            return np.empty(0, np.int32), np.empty(0, np.int32)
        return self.kernel_ids, self.selection.ids


@dataclass(frozen=True)
class Masses:
    """What the chunks of a token's attention hold, for all heads: float64 [qh][chunks].

    A chunk is ``length`` neighbouring entries of the list, which has ``listed``. ``maxima`` are the largest
    exponents, ``sums`` the sums of the exponentials relative to them, as the kernel wrote them (NaN: not
    yet); ``reference_maxima`` and ``reference_sums`` follow in float64 from the cells that are listed (NaN
    where one of them is not in the cache).
    """

    token: int
    listed: int
    length: int
    maxima: Array
    sums: Array
    reference_maxima: Array
    reference_sums: Array

    @property
    def shares(self) -> Array:
        """The share of its head's attention that each chunk has, by the kernel: float64 [qh][chunks]."""
        return _shares(self.maxima, self.sums)

    @property
    def reference_shares(self) -> Array:
        """The same by the reference."""
        return _shares(self.reference_maxima, self.reference_sums)


@dataclass(frozen=True)
class Cellweights:
    """How the attention of one query head of a token is spread over its cells.

    ``cells`` is the kernel's list, int32 [n] (empty before there is one), ``chunks`` the chunk of each entry.
    ``reference``, float64 [n], are the shares of the attention in float64. Kernels keep nothing by cell:
    ``kernel`` is the share that the kernel gave to the entry's chunk, split up as the reference does.
    """

    token: int
    head: int
    cells: Array
    chunks: Array
    kernel: Array
    reference: Array


@_SILENTLY
def chosen(
    trace: Trace,
    position: int,
    token: int,
    needles: Sequence[int] | None = None,
    *,
    reference: bool = True,
) -> Chosen:
    """The selection of a token after the first ``position`` dispatches of ``trace``.

    ``needles`` are by default those that the trace tells of itself (``about["needles"]``). Without
    ``reference`` the scores that should be there are left out, which take the longest. Raises ArgumentError
    for a token or a position that the trace does not have.
    """
    moment = _Moment(trace, position, token)
    scores = moment.scores
    try:
        found = selection(scores, moment.n_kv, moment.sizes.qbudget)
    except ArgumentError:  # NaN: not written yet, or rubbish
        found = None
    told = trace.about.get("needles", ()) if needles is None else needles
    return Chosen(
        token,
        moment.n_kv,
        moment.sizes.qbudget,
        scores,
        moment.reference_scores if reference else np.full(len(scores), np.nan),
        found,
        moment.ids,
        tuple(int(cell) for cell in told if cell < moment.n_kv),
    )


@_SILENTLY
def chunk_masses(trace: Trace, position: int, token: int) -> Masses:
    """What the chunks of a token hold after the first ``position`` dispatches. Raises as ``chosen`` does."""
    moment = _Moment(trace, position, token)
    exponents = moment.exponents(range(moment.sizes.qh))
    return Masses(token, moment.listed, moment.length, *moment.partials, *_by_chunk(exponents, moment.length))


@_SILENTLY
def cell_weights(trace: Trace, position: int, token: int, head: int) -> Cellweights:
    """How a head of a token spreads its attention, after the first ``position`` dispatches.

    Raises as ``chosen`` does, and for a head that there is not.
    """
    moment = _Moment(trace, position, token)
    if not 0 <= head < moment.sizes.qh:
        raise ArgumentError(f"There are {moment.sizes.qh} query heads: there is no head {head}.")
    if moment.ids is None:
        none = np.empty(0)
        return Cellweights(token, head, none.astype(np.int32), none.astype(int), none, none)
    exponents = moment.exponents(range(head, head + 1))
    maxima, sums = _by_chunk(exponents, moment.length)
    chunks = np.arange(len(moment.ids)) // moment.length
    inside = np.exp(exponents[0] - maxima[0, chunks]) / sums[0, chunks]
    kernel, reference = (
        _shares(*of)[0, chunks] * inside
        for of in ([x[head : head + 1] for x in moment.partials], (maxima, sums))
    )
    return Cellweights(token, head, moment.ids, chunks, kernel, reference)


def position_of(trace: Trace, token: int) -> int:
    """The position at which a token has its output: after its call, for as much of it as was recorded."""
    return _Moment(trace, len(trace), token).end


# ---- in words ------------------------------------------------------------------------------------------


def arguments_words(trace: Trace, token: int) -> str:
    """``QsaArgs`` of a token's call and what it makes the token see. Raises as ``chosen`` does."""
    moment = _Moment(trace, len(trace), token)
    n_kv, pos0 = moment.n_kv, moment.n_kv - 1 - moment.index
    whole, rest = divmod(n_kv, BLOCK)
    blocks = f"{_count(whole, 'whole block')} of four"
    of_last = _numbers(range(BLOCK * whole, n_kv))
    unfinished = f"with {_count(rest, 'cell')} ({of_last})" if rest else "without cells"
    if moment.call is None:
        return f"The call of token {token} has not begun: it will see {_count(n_kv, 'cell')}."
    return (
        f"pos0 = {pos0}, max_cells = {moment.sizes.max_cells}: before the call {pos0} of the cache's "
        f"{moment.sizes.max_cells} cells are filled. Token {moment.index} of the call sees n_kv = {n_kv} "
        f"cells: {blocks}, and the unfinished block {whole} {unfinished}."
    )


def cut_words(selection: Selection) -> str:
    """Where a selection ends, and how nearly it would have ended elsewhere."""
    cut = selection.cut
    if cut is None:
        return (
            f"Every cell is taken, in order: {selection.n_kv} with a budget of {selection.budget}. No score "
            "is read."
        )
    kept = len(selection.ids) - cut.cells_above - _whole_cells(selection, cut.ties[: cut.ties_taken - 1])
    of_last = f"{kept} of its {kept + len(cut.cells_cut)} cells"
    if len(cut.ties) == 1:
        ties = f"One block has this very score, {cut.last_block}: it gives {of_last}."
    else:
        ties = (
            f"{len(cut.ties)} blocks tie with this very score: the first {cut.ties_taken} are taken, and the "
            f"last of these, {cut.last_block}, gives {of_last}."
        )
    if cut.next_block is None:
        after = "No block is left out."
    elif cut.margin:
        after = f"The best block left out is {cut.next_block}, its score lower by {cut.margin:.3g}."
    else:
        after = f"The best block left out, {cut.next_block}, has the same score and a higher index."
    return (
        f"{len(selection.ids)} of {selection.n_kv} cells are taken. The cut is at key 0x{cut.key:08X}, score "
        f"{cut.score:.7g}: {_count(len(cut.above), 'block')} above it, {_count(cut.cells_above, 'cell')}. "
        f"{ties} {after}"
    )


def selection_words(chosen: Chosen) -> str:
    """``cut_words`` of a token, or why there is no cut to tell of."""
    if chosen.selection is not None:
        return cut_words(chosen.selection)
    unknown = int(np.isnan(chosen.scores).sum())
    if unknown == len(chosen.scores):
        return "The blocks have no scores yet."
    return f"{unknown} of {len(chosen.scores)} scores are NaN, so there is no order to select by."


def list_words(chosen: Chosen) -> str:
    """The kernel's list beside the reference's."""
    if chosen.kernel_ids is None:
        return "The kernel has not listed cells yet."
    if chosen.selection is None:
        return f"The kernel listed {_count(len(chosen.kernel_ids), 'cell')}, but the scores have no order."
    if chosen.agrees:
        return (
            f"The kernel's list is the reference's, element for element: {_count(len(chosen.hits), 'hit')}."
        )
    found = [_count(len(chosen.hits), "hit")]
    for cells, one, many in (
        (chosen.misses, "miss", "misses"),
        (chosen.extras, "extra", "extras"),
        (chosen.strays, "number that is no cell it sees", "numbers that are no cells it sees"),
    ):
        if len(cells):
            found.append(f"{len(cells)} {one if len(cells) == 1 else many} ({_numbers(cells)})")
    told = f"The kernel's list differs from the reference's: {', '.join(found)}"
    if len(found) > 1:
        return f"{told}."
    return f"{told}; the cells are right, but not in ascending order, once each."


def needle_words(chosen: Chosen) -> str:
    """Which needles the token found; "" where none are known."""
    if not chosen.needles:
        return ""
    if chosen.kernel_ids is None:
        return f"Needles at {_numbers(chosen.needles)}."
    found, lost = chosen.needles_found, chosen.needles_lost
    told = f"{len(found)} of {_count(len(chosen.needles), 'needle')} found"
    told += f" ({_numbers(found)})" if found else ""
    return told + (f"; lost: {_numbers(lost)}." if lost else ".")


def _whole_cells(selection: Selection, blocks: Array) -> int:
    return int(block_cells(selection.n_kv)[blocks].sum())


def _count(number: int, of: str) -> str:
    return f"{number} {of}" if number == 1 else f"{number} {of}s"


def _numbers(cells: Sequence[int] | Array) -> str:
    first = [str(int(cell)) for cell in cells[:TOLD]]
    return ", ".join(first) + (", ..." if len(cells) > TOLD else "")


# ---- from the buffers ----------------------------------------------------------------------------------


class _Moment:
    """The buffers of a token's call after the first ``position`` dispatches of a trace."""

    def __init__(self, trace: Trace, position: int, token: int) -> None:
        if not 0 <= position <= len(trace):
            raise ArgumentError(f"The trace has {len(trace)} dispatches: there is no position {position}.")
        rows = int(trace.about["rows"])
        if not 0 <= token < rows:
            raise ArgumentError(f"The trace is of {rows} tokens: there is no token {token}.")
        self.sizes = Sizes(**trace.about["sizes"])
        self.n_kv = int(trace.about["cells"]) + token + 1
        self.listed = min(self.n_kv, self.sizes.qbudget)
        # A call that has begun has a step, unless recording was interrupted in its first.
        mine = (c for c in trace.chunks if c.plan.first <= token < c.plan.first + c.plan.rows)
        self.call = next((c for c in mine if c.first_step < len(trace)), None)
        self.steps: Sequence[Step] = ()
        self.index, self.end, self.done = 0, len(trace), 0
        if self.call is not None:
            first, self.index = self.call.first_step, token - self.call.plan.first
            self.steps = trace[first : first + len(self.call.plan.dispatches)]
            self.end = first + len(self.steps)
            self.done = min(max(position - first, 0), len(self.steps))

    @property
    def length(self) -> int:
        """Cells of a chunk; on v2, before the path is known."""
        return self.sizes.chunk_cells(self.call.plan.path if self.call else "v2")

    @property
    def chunks(self) -> int:
        """The chunks that have cells."""
        return -(-self.listed // self.length)

    def _row(self, buffer: str) -> Array | None:
        """What the token has of a buffer; None before its call's first dispatch."""
        return self.steps[self.done - 1].value(buffer)[self.index] if self.done else None

    @functools.cached_property
    def scores(self) -> Array:
        """float32 [blocks], those that have cells."""
        blocks, found = len(block_cells(self.n_kv)), self._row("scores")
        return np.full(blocks, np.nan, np.float32) if found is None else found[:blocks]

    @property
    def reference_scores(self) -> Array:
        """float64 [blocks]; NaN where nothing is known of them."""
        scores = np.full(len(block_cells(self.n_kv)), np.nan)
        step = next((s for s in self.steps if "scores" in s.dispatch.writes), None)
        expected = step.expected("scores") if step is not None else None
        if expected is not None:
            values, defined = (x[self.index, : len(scores)] for x in (expected.values, expected.defined))
            scores[defined] = values[defined]
        return scores

    @functools.cached_property
    def ids(self) -> Array | None:
        """int32 [listed]; None before the kernel that lists them came to its end."""
        done = any("ids" in step.dispatch.writes and not step.fault for step in self.steps[: self.done])
        found = self._row("ids") if done else None
        return None if found is None else found[: self.listed]

    @property
    def partials(self) -> tuple[Array, Array]:
        """Maxima and sums as they were written: float64 [qh][chunks]."""
        found = self._row("part")
        if found is None:
            return (np.full((self.sizes.qh, self.chunks), np.nan),) * 2
        maxima, sums = found[: self.chunks, :, self.sizes.qd :].transpose(2, 1, 0).astype(float)
        return maxima, sums

    def exponents(self, heads: range) -> Array:
        """``q.k / sqrt(qd)`` of query heads with the listed cells: float64 [heads][listed], NaN before there
        is a list, and where it has what is not in the cache."""
        z, found = self.sizes, np.full((len(heads), self.listed), np.nan)
        if self.ids is None or not ((self.ids >= 0) & (self.ids < z.max_cells)).all():
            return found
        last = self.steps[self.done - 1]
        queries = last.value("qcur")[self.index].astype(float)
        kq, ksc = last.value("kq"), last.value("ksc")
        for g in range(heads.start // z.heads_per_kv, (heads.stop - 1) // z.heads_per_kv + 1):
            keys = Quantised(kq[:, g : g + 1], ksc[:, g : g + 1]).floats(self.ids)[:, 0]
            mine = range(max(heads.start, g * z.heads_per_kv), min(heads.stop, (g + 1) * z.heads_per_kv))
            rows = slice(mine.start - heads.start, mine.stop - heads.start)
            found[rows] = queries[mine.start : mine.stop] @ keys.T * z.qd**-0.5
        return found


def _by_chunk(exponents: Array, length: int) -> tuple[Array, Array]:
    """The largest of each chunk, and the sum of exponentials relative to it: both [heads][chunks]."""
    starts = np.arange(0, exponents.shape[1], length)
    maxima = np.maximum.reduceat(exponents, starts, axis=1)
    relative = np.exp(exponents - np.repeat(maxima, length, axis=1)[:, : exponents.shape[1]])
    return maxima, np.add.reduceat(relative, starts, axis=1)


@_SILENTLY
def _shares(maxima: Array, sums: Array) -> Array:
    """The share of each chunk in its head's mass: [heads][chunks]."""
    masses = sums * np.exp(maxima - maxima.max(1, keepdims=True))
    return masses / masses.sum(1, keepdims=True)
