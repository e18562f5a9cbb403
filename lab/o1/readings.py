"""What is to be seen in a trace of the o1 system, as data: rings, shares of a row, gains, running masses.

Everything is read at a position: after the first so many dispatches. What the kernels have not written by
then is NaN. What broken kernels wrote is told as it is, and where nothing follows from it there is NaN.

The reference side comes from the tokens themselves, in float64: a row's near weights are ``exp(s q.k)``, and
landmark ``b`` brings it ``sum_a exp(s q.k_tilde[a]) mu[a][b] z_b``, with ``z_b`` the sum of
``exp(s q_tilde[b].k)`` over all evicted tokens. It is NaN where the trace does not know them.

Tokens have global numbers, from 0 for the first that the layer was ever given; row ``r`` of a trace is the
``r``-th token after those that were there at its start.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ArgumentError
from ..systems.trace import Chunk, Step, Trace
from ..systems.versions import Version
from . import reference
from .plans import SPLITS, STRIPES
from .reference import History
from .sizes import MAX_ROWS, Sizes
from .state import LANDMARKS, SINKS

__all__ = [
    "PARTS",
    "Flow",
    "Gains",
    "Masses",
    "Ring",
    "Weights",
    "distances",
    "flow",
    "gains",
    "invariants",
    "masses",
    "meta_words",
    "position_of",
    "rings",
    "weights",
]

Array = np.ndarray

PARTS = ("sinks", "window", "chunk", "far")
EMPTY, UNKNOWN = -1, -2  # in the place of a token's number

_SILENTLY = np.errstate(all="ignore")  # what comes of rubbish is NaN
_SKIPPED = -1e29  # a stripe whose maximum is no larger held nothing
_LEAST_SUM = 1e-30
_TINY = 1e-30  # below it a rescale has lost what it multiplied


@dataclass(frozen=True)
class Weights:
    """The attention of one row and query head.

    ``columns`` says in words what each share goes to, ``parts`` (uint8) which of PARTS it belongs to. The
    shares are float64 of that length and add up to 1: ``kernel`` from the buffers that the kernels wrote, and
    ``reference``. The last one is that of the far field, which has ``evicted`` tokens. NaN: not written yet.

    The token path keeps nothing by column: ``kernel`` is then what the kernels gave to the column's stripe,
    split up in float64 from the keys in memory.
    """

    row: int
    head: int
    columns: tuple[str, ...]
    parts: np.ndarray
    kernel: np.ndarray
    reference: np.ndarray
    evicted: int = 0

    @_SILENTLY
    def split(self, side: str = "kernel") -> np.ndarray:
        """The shares of PARTS, float64 [4]; ``side`` is ``kernel`` or ``reference``."""
        shares = self.kernel if side == "kernel" else self.reference
        return np.array([shares[self.parts == part].sum() for part in range(len(PARTS))])


@dataclass(frozen=True)
class Gains:
    """What each landmark brings to the rows of a chunk, for one query head.

    ``kernel`` and ``reference``, float64 [rows][m], are shares of the row's mass; ``first`` is the first row.
    NaN where a row has no far field. ``far_share_kernel`` and ``far_share_reference`` [rows] are those of all
    landmarks together: 0 where there is no far field, or where its part was left out.
    """

    head: int
    first: int
    kernel: np.ndarray
    reference: np.ndarray
    far_share_kernel: np.ndarray
    far_share_reference: np.ndarray


@dataclass(frozen=True)
class Masses:
    """The running maxima and masses of one query head's landmarks, float64 [n][m], after each chunk; ``rows``
    [n] are the tokens that had been pushed then."""

    head: int
    rows: np.ndarray
    maxima: np.ndarray
    masses: np.ndarray
    reference_maxima: np.ndarray
    reference_masses: np.ndarray


@dataclass(frozen=True)
class Flow:
    """How the tokens that a chunk evicts go into the landmarks of one query head: ``masses * rescale``, and
    the weights of the tokens added up, is ``after``.

    ``tokens`` [n] leave, from ``slots``. ``maxima`` and ``masses`` [m] are those before the chunk,
    ``maxima_after`` and ``after`` those after it, masses each relative to their maxima; ``rescale`` [m] is
    ``exp(maxima - maxima_after)`` and ``weights`` [n][m] is what each token brings. All float64, as the
    kernels wrote them, NaN where they have not yet. ``committed``: the state has them.
    """

    head: int
    tokens: np.ndarray
    slots: np.ndarray
    maxima: np.ndarray
    masses: np.ndarray
    rescale: np.ndarray
    weights: np.ndarray
    maxima_after: np.ndarray
    after: np.ndarray
    committed: bool


@dataclass(frozen=True)
class Ring:
    """The ring of one group as it lies in memory.

    ``length``, ``head``, ``far`` and ``own_window`` are the words of ``meta`` as the kernels left them; the
    group uses the first ``window`` of ``slots`` slots. ``tokens``, int64 [slots], are the numbers of the
    tokens whose keys lie in the slots: -1 is an empty one, -2 one that holds the key of no known token.

    Of the chunk that the dispatch just run belongs to: ``leaving`` are the tokens that it evicts as long as
    they are in the ring, ``evicted`` the same once they have left it, out of ``evicted_slots``; ``written``
    are the slots whose contents it changed, ``entering`` the numbers of its tokens before they are there.
    ``texts`` are the tokens' texts by slot, "" where not known.
    """

    group: int
    window: int
    slots: int
    length: int
    head: int
    far: int
    own_window: int
    tokens: np.ndarray
    written: np.ndarray
    evicted: np.ndarray
    evicted_slots: np.ndarray
    leaving: np.ndarray
    entering: np.ndarray
    texts: tuple[str, ...] = ()

    @property
    def next_slot(self) -> int:
        """The slot that the next token goes into, as ``meta`` has it."""
        return (self.head + self.length) % self.window

    @property
    def logical(self) -> np.ndarray:
        """The filled slots as ``meta`` has them, oldest first: int64 [length]."""
        return (self.head + np.arange(min(self.length, self.window))) % self.window

    @property
    def ages(self) -> np.ndarray:
        """How many tokens are newer than that in each slot: int64 [slots], -1 where there is none known."""
        return np.where(self.tokens >= 0, self.tokens.max(initial=-1) - self.tokens, -1)

    def age(self, slot: int) -> int:
        """How many tokens in the ring are newer than that in ``slot``; -1 where there is none known."""
        return int(self.ages[slot])


# ---- at a position -------------------------------------------------------------------------------------


@_SILENTLY
def weights(trace: Trace, position: int, row: int, head: int) -> Weights:
    """What ``row`` attends to with query head ``head``, after the first ``position`` dispatches.

    Raises ArgumentError for a position, row or head that there is not.
    """
    moment = _Moment.of_row(trace, position, row)
    given = moment.given
    given.check_head(head)
    group, ns = head // given.sizes.hpg, given.sizes.ns
    tokens, first = given.seen(group, row), given.token(group, moment.first)
    of_chunk = max(first, tokens.start)
    columns = (
        *(f"sink {n}" for n in range(ns)),
        *(f"{given.name(t)}, slot {given.slot(group, t)}" for t in range(tokens.start, of_chunk)),
        *(f"row {t - first} of the chunk, {given.name(t)}" for t in range(of_chunk, tokens.stop)),
        "far field",
    )
    counts = ns, of_chunk - tokens.start, tokens.stop - of_chunk, 1
    far, known = moment.far(row, head), given.shares(row, head)
    return Weights(
        row,
        head,
        columns,
        np.repeat(np.arange(len(PARTS), dtype=np.uint8), counts),
        np.append(moment.near(row, head), far.denominator * far.inverse),
        np.full(len(columns), np.nan) if known is None else np.append(known[0], known[1].sum()),
        tokens.start,
    )


@_SILENTLY
def gains(trace: Trace, position: int, head: int) -> Gains:
    """What the landmarks of query head ``head`` bring to the rows of the chunk that the dispatch just run
    belongs to. Raises ArgumentError for a position or head that there is not."""
    moment = _Moment.of_position(trace, position)
    given = moment.given
    given.check_head(head)
    rows = range(moment.first, moment.first + moment.rows)
    shape = len(rows), given.sizes.m
    kernel, expected = np.full(shape, np.nan), np.full(shape, np.nan)
    shares, expected_shares = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    for i, row in enumerate(rows):
        any_far = given.seen(head // given.sizes.hpg, row).start > 0
        far, known = moment.far(row, head), given.shares(row, head)
        shares[i] = far.denominator * far.inverse
        if any_far:
            kernel[i] = far.masses * far.inverse
        if known is not None:
            expected_shares[i] = known[1].sum()
            if any_far:
                expected[i] = known[1]
    return Gains(head, moment.first, kernel, expected, shares, expected_shares)


@_SILENTLY
def masses(trace: Trace, position: int, head: int) -> Masses:
    """Running maxima and masses of query head ``head``, after every chunk that had brought them up to date by
    ``position``. Raises as ``gains`` does."""
    _check(trace, position)
    given = _given(trace)
    given.check_head(head)
    group, m = head // given.sizes.hpg, given.sizes.m
    steps = [step for chunk in trace.chunks if (step := _writer(trace, chunk, "mz", position))]
    pushed = [given.token(group, step.plan.first + step.plan.rows) for step in steps]
    values = np.array([step.value("mz")[head].astype(float) for step in steps]).reshape(len(steps), 2, m)
    maxima = expected = np.full((len(steps), m), np.nan)
    if given.history is not None:
        gone = [given.oldest(group, n) for n in pushed]
        none = np.full((1, m), -np.inf)
        maxima = np.maximum.accumulate(np.concatenate([none, given.exponents(head)]))[gone]
        expected = np.where(np.isneginf(maxima), 0.0, np.exp(given.sums(head)[gone] - maxima))
    return Masses(head, np.array(pushed, int), values[:, 0], values[:, 1], maxima, expected)


@_SILENTLY
def flow(trace: Trace, position: int, head: int) -> Flow:
    """How the evicted tokens of the chunk of the dispatch just run go into the landmarks of ``head``.

    Raises as ``gains`` does.
    """
    moment = _Moment.of_position(trace, position)
    given = moment.given
    given.check_head(head)
    group, m = head // given.sizes.hpg, given.sizes.m
    tokens = np.array(given.evicted_by(group, moment.first, moment.rows), int)
    rows = tokens + given.windows[group] - given.token(group, moment.first)  # that evict them
    before, found = moment.before("mz")[head].astype(float), moment.written("s")
    if found is None:
        found = np.full(130 * given.sizes.ghm, np.nan)
    e, zc, top, r = _planes(found, given.sizes, head)
    return Flow(
        head,
        tokens,
        np.array([given.slot(group, t) for t in tokens], int),
        before[:m],
        before[m:],
        r,
        e[:, rows].T,
        top,
        zc[:, moment.rows - 1],
        moment.written("mz") is not None,
    )


@_SILENTLY
def distances(trace: Trace, position: int) -> Array:
    """How far each row's output is from softmax attention over all tokens: |o1 - full| / |full|, float64
    [rows][nh], NaN for rows without one after the first ``position`` dispatches, and where tokens are not
    known. Raises ArgumentError for a position that there is not."""
    _check(trace, position)
    given = _given(trace)
    found = np.full((given.rows, given.sizes.nh), np.nan)
    writers = [_writer(trace, chunk, "out", position) for chunk in trace.chunks]
    steps = [step for step in writers if step is not None]
    if steps and given.full is not None:
        done = steps[-1].plan.first + steps[-1].plan.rows
        full = given.full[:done]
        off = np.linalg.norm(steps[-1].value("out")[:done] - full, axis=-1)
        found[:done] = off / np.linalg.norm(full, axis=-1)
    return found


def position_of(trace: Trace, row: int) -> int:
    """The position at which ``row`` is done: after its chunk, for as much of it as was recorded. Raises
    ArgumentError for a row that there is not."""
    moment = _Moment.of_row(trace, len(trace), row)
    return moment.start + len(moment.steps)


# ---- the ring ------------------------------------------------------------------------------------------


def rings(trace: Trace, position: int) -> tuple[Ring, ...]:
    """The ring of each group after the first ``position`` dispatches. Raises ArgumentError for a position
    that there is not."""
    moment = _Moment.of_position(trace, position)
    given, versions = moment.given, trace.versions_at(position)
    meta = trace.store.array("meta", versions["meta"])
    keys = trace.store.array("ring_k", versions["ring_k"])
    pushed = moment.written("ring_k") is not None
    changed = moment.changed_slots(versions)
    found = []
    for group in range(given.sizes.ng):
        first = given.token(group, moment.first)
        gone = np.array(given.evicted_by(group, moment.first, moment.rows), int)
        slots = np.array([given.slot(group, t) for t in gone], int)
        none = gone[:0]
        tokens = given.in_memory(group, first + (moment.rows if pushed else 0), keys[group])
        length, head, far, own = map(int, meta[group])
        found.append(
            Ring(
                group,
                given.windows[group],
                given.sizes.w,
                length,
                head,
                far,
                own,
                tokens,
                written=np.flatnonzero(changed[group]),
                evicted=gone if pushed else none,
                evicted_slots=slots if pushed else none,
                leaving=gone if not pushed and moment.done else none,
                entering=first + np.arange(moment.rows if not pushed and moment.done else 0),
                texts=tuple(given.text(t) for t in tokens.tolist()) if given.texts else (),
            )
        )
    return tuple(found)


def meta_words(ring: Ring) -> str:
    """What ``meta`` says of a group, in words."""
    window = f"{ring.window} slots" + (f" of w = {ring.slots}" if ring.window != ring.slots else "")
    told = f"{ring.length} of {window} filled"
    if ring.length > 0:
        oldest = f", the oldest token in slot {ring.head}"
        told += oldest if ring.length <= ring.window else f", which cannot be{oldest}"
    far = f"{ring.far} token has" if ring.far == 1 else f"{ring.far} tokens have"
    return f"{told}; the next token goes into slot {ring.next_slot}; {far} left for the far field."


def invariants(trace: Trace, position: int) -> tuple[str, ...]:
    """What must hold of ``meta`` after every dispatch and does not after the first ``position``, in words.

    The length is at most the window, the head is one of its slots, length and far count add up to the tokens
    pushed, the head has gone on by a slot for each token evicted, and the window stays what it was. Raises
    ArgumentError for a position that there is not.
    """
    moment = _Moment.of_position(trace, position)
    given = moment.given
    meta = trace.store.array("meta", trace.versions_at(position)["meta"])
    rows = moment.first + (moment.rows if moment.written("meta") is not None else 0)
    wrong = []
    for group, (length, head, far, own) in enumerate(meta.tolist()):
        window = given.windows[group]
        pushed = given.token(group, rows)
        before, of = f"Group {group}: ", f"its window of {window} slots"
        if length > window:
            wrong.append(f"{before}the length {length} is more than {of}.")
        if head >= window:
            wrong.append(f"{before}the head {head} is none of {of}.")
        elif head != given.slot(group, far):
            wrong.append(
                f"{before}the head is slot {head}; after {far} evictions it is slot {given.slot(group, far)}."
            )
        if length + far != pushed:
            wrong.append(f"{before}length {length} and far count {far} do not add up to {pushed} tokens.")
        if own != given.own_windows[group]:
            wrong.append(f"{before}the window in meta is {own}, and was {given.own_windows[group]}.")
    return tuple(wrong)


# ---- from the buffers ----------------------------------------------------------------------------------


class _Given:
    """What a trace begins with: sizes, rows, where tokens lie, and the tokens themselves where they are
    known."""

    def __init__(self, trace: Trace) -> None:
        if trace.system != "o1":
            raise ArgumentError(f"The trace is one of {trace.system}, not of o1.")
        self.sizes = z = Sizes(**trace.about["sizes"])
        self.rows = int(trace.about["rows"])
        self.texts = tuple(map(str, trace.about.get("tokens", ())))
        self.scale = float(np.float32(z.scale))
        versions = trace.versions_at(0)
        start = {name: trace.store.array(name, versions[name]) for name in _AT_START}
        self.windows = tuple(z.window(g) for g in range(z.ng))
        self.own_windows = tuple(int(x) for x in start["meta"][:, 3])
        self.q, self.k, self.v = (start[name] for name in "qkv")
        self.start_keys = start["ring_k"]
        self.history: History | None = None
        if "past_keys" in trace.extra:
            fixed = {name: start[name] for name in (*LANDMARKS, *SINKS)}
            self.history = replace(
                History.fresh(z, **fixed, windows=self.own_windows),
                keys=trace.extra["past_keys"],
                values=trace.extra["past_values"],
            )
            after = self.history.push(self.k, self.v)
            self.keys = after.keys.astype(float)
            past = self.history.pushed
            self.far = tuple(max(0, past - window) for window in self.windows)
            self.head = tuple(far % window for far, window in zip(self.far, self.windows, strict=True))
            self.past = (past,) * z.ng
        else:
            meta = start["meta"].astype(int)
            self.far = tuple(meta[:, 2].tolist())
            self.head = tuple((meta[:, 1] % self.windows).tolist())
            self.past = tuple((meta[:, 2] + np.minimum(meta[:, 0], self.windows)).tolist())
        self._sums: dict[int, Array] = {}

    # -- checks

    def check_head(self, head: int) -> None:
        if not 0 <= head < self.sizes.nh:
            raise ArgumentError(f"There are {self.sizes.nh} query heads: there is no head {head}.")

    def check_row(self, row: int) -> None:
        if not 0 <= row < self.rows:
            raise ArgumentError(f"The trace is of {self.rows} rows: there is no row {row}.")

    # -- tokens by number

    def token(self, group: int, row: int) -> int:
        """The token of a row; of the row after the last one: how many tokens have been pushed then."""
        return self.past[group] + row

    def oldest(self, group: int, pushed: int) -> int:
        """The oldest token in the window, once so many have been pushed; those before it are evicted."""
        return max(self.far[group], pushed - self.windows[group])

    def seen(self, group: int, row: int) -> range:
        """The tokens in the window of a row, itself included."""
        pushed = self.token(group, row) + 1
        return range(self.oldest(group, pushed), pushed)

    def evicted_by(self, group: int, first: int, rows: int) -> range:
        """The tokens that so many rows evict."""
        before = self.token(group, first)
        return range(self.oldest(group, before), self.oldest(group, before + rows))

    def slot(self, group: int, token: int) -> int:
        """The slot that a token is put into."""
        return (self.head[group] + token - self.far[group]) % self.windows[group]

    def text(self, token: int) -> str:
        return self.texts[token] if 0 <= token < len(self.texts) else ""

    def name(self, token: int) -> str:
        text = self.text(token)
        return f"token {token} ‘{text}’" if text else f"token {token}"

    # -- what lies in the slots

    def keys_of(self, group: int, tokens: range) -> Array:
        """The keys of tokens that are rows of the trace or were in the ring at its start, float32 [n][d]."""
        past = self.past[group]
        old = [self.slot(group, t) for t in tokens if t < past]
        new = range(max(tokens.start, past) - past, max(tokens.stop, past) - past)
        return np.concatenate([self.start_keys[group, old], self.k[new.start : new.stop, group]])

    def in_memory(self, group: int, pushed: int, found: Array) -> Array:
        """The tokens whose keys lie in ``found`` [w][d], once ``pushed`` tokens should be there: [w]."""
        tokens = np.full(self.sizes.w, EMPTY)
        expected = range(self.oldest(group, pushed), pushed)
        slots = np.array([self.slot(group, t) for t in expected], int)
        tokens[slots] = expected
        keys = self.start_keys[group].copy()
        keys[slots] = self.keys_of(group, expected)
        wrong = np.flatnonzero((keys.view(np.uint32) != found.view(np.uint32)).any(-1))
        if len(wrong):
            every = range(self.far[group], self.token(group, self.rows))
            numbers = {key.tobytes(): t for t, key in zip(every, self.keys_of(group, every), strict=True)}
            empty = np.zeros(self.sizes.d, np.float32).tobytes()
            numbers.setdefault(empty, EMPTY)
            tokens[wrong] = [numbers.get(found[slot].tobytes(), UNKNOWN) for slot in wrong]
        return tokens

    # -- the reference

    @functools.cached_property
    def full(self) -> Array | None:
        """Softmax attention over all tokens, float64 [rows][nh][d]."""
        known = self.history
        return None if known is None else reference.full_attention(known, self.q, self.k, self.v)

    def exponents(self, head: int) -> Array:
        """``s q_tilde[b].k`` of every token with the landmarks of a head: float64 [tokens][m]."""
        assert self.history is not None
        queries = self.history.q_tilde[head].astype(float)
        return self.scale * self.keys[head // self.sizes.hpg] @ queries.T

    def sums(self, head: int) -> Array:
        """The logarithms of the landmarks' masses once 0, 1, 2, ... tokens are evicted: [tokens + 1][m]."""
        if head not in self._sums:
            none = np.full((1, self.sizes.m), -np.inf)
            self._sums[head] = np.logaddexp.accumulate(np.concatenate([none, self.exponents(head)]))
        return self._sums[head]

    def shares(self, row: int, head: int) -> tuple[Array, Array] | None:
        """What a row attends to by the definition: shares of sinks and window [n], and of what each landmark
        brings [m]. None where tokens are not known."""
        if self.history is None:
            return None
        group, tokens = head // self.sizes.hpg, self.seen(head // self.sizes.hpg, row)
        query = self.q[row, head].astype(float)
        sinks = self.history.sink_k[group].astype(float)
        near = self.scale * np.concatenate([sinks, self.keys[group, tokens.start : tokens.stop]]) @ query
        top = near.max()
        far = np.zeros(self.sizes.m)
        if tokens.start > 0:
            landmarks = self.scale * self.history.k_tilde[group].astype(float) @ query
            sums = self.sums(head)[tokens.start] + landmarks.max()
            top = max(top, sums.max())
            far = np.exp(landmarks - landmarks.max()) @ self.history.mu[head].astype(float)
            far *= np.exp(sums - top)
            if not far.sum() >= 0:
                far[:] = 0.0
        weights = np.exp(near - top)
        total = weights.sum() + far.sum()
        return weights / total, far / total


_AT_START = ("meta", "ring_k", *LANDMARKS, *SINKS, "q", "k", "v")
_KNOWN: weakref.WeakKeyDictionary[Trace, _Given] = weakref.WeakKeyDictionary()


def _given(trace: Trace) -> _Given:
    found = _KNOWN.get(trace)
    if found is None:
        found = _KNOWN[trace] = _Given(trace)
    return found


@dataclass(frozen=True)
class _Far:
    """The far part of a row, by one head, as kernels wrote it: all relative to the same maximum, of whose
    total ``inverse`` is the inverse. ``masses`` [m] are what each landmark brings."""

    denominator: float
    inverse: float
    masses: Array


class _Moment:
    """The buffers of a chunk after the first ``position`` dispatches of a trace."""

    def __init__(self, trace: Trace, position: int, chunk: Chunk | None, first: int) -> None:
        self.trace, self.given = trace, _given(trace)
        # A chunk that has begun has a step, unless recording was interrupted in its first.
        begun = chunk is not None and chunk.first_step < len(trace)
        self.path = chunk.plan.path if chunk is not None else "chunk"
        self.first = chunk.plan.first if chunk is not None else first
        self.rows = chunk.plan.rows if chunk is not None else 0
        self.start = chunk.first_step if chunk is not None and begun else len(trace)
        count = len(chunk.plan.dispatches) if chunk is not None else 0
        self.steps: Sequence[Step] = trace[self.start : self.start + count]
        self.done = min(max(position - self.start, 0), len(self.steps))
        self._arrays: dict[str, Array | None] = {}

    @classmethod
    def of_position(cls, trace: Trace, position: int) -> _Moment:
        """The chunk of the dispatch just run; before the first one, the first chunk."""
        _check(trace, position)
        number = trace[position - 1].chunk if position else 0
        return cls(trace, position, trace.chunks[number] if trace.chunks else None, 0)

    @classmethod
    def of_row(cls, trace: Trace, position: int, row: int) -> _Moment:
        """The chunk that ``row`` belongs to; a row of which none is known yet is its first."""
        _check(trace, position)
        _given(trace).check_row(row)
        mine = (c for c in trace.chunks if c.plan.first <= row < c.plan.first + c.plan.rows)
        return cls(trace, position, next(mine, None), row)

    def written(self, buffer: str) -> Array | None:
        """A buffer as it is, if a dispatch of the chunk that writes it has been run."""
        if buffer not in self._arrays:
            done = self.steps[: self.done]
            wrote = any(buffer in step.dispatch.writes and not step.fault for step in done)
            self._arrays[buffer] = done[-1].value(buffer) if wrote else None
        return self._arrays[buffer]

    def before(self, buffer: str) -> Array:
        """A buffer as it was when the chunk began."""
        if self.steps:
            return self.steps[0].value_before(buffer)
        versions = self.trace.versions_at(len(self.trace))
        return self.trace.store.array(buffer, versions[buffer])

    def changed_slots(self, versions: Mapping[str, Version]) -> Array:
        """In which slots the ring is not what it was when the chunk began: bool [ng][w]."""
        z = self.given.sizes
        changed = np.zeros((z.ng, z.w), bool)
        for name in ("ring_k", "ring_v"):
            if self.done and versions[name] is not self.steps[0].before[name]:
                now = self.trace.store.array(name, versions[name])
                changed |= (now.view(np.uint32) != self.before(name).view(np.uint32)).any(-1)
        return changed

    # -- a row by one head

    def near(self, row: int, head: int) -> Array:
        """Shares of sinks and window, [n]."""
        z, group, i = self.given.sizes, head // self.given.sizes.hpg, row - self.first
        tokens = self.given.seen(group, row)
        count = z.ns + len(tokens)
        if self.path == "token":
            return self._by_stripe(row, head)
        sc, inv = self.written("sc"), self.written("inv")
        if sc is None or inv is None:
            return np.full(count, np.nan)
        if self.path == "matmul":  # columns: sinks, the ring before the chunk, the rows of the chunk
            oldest = self.given.oldest(group, self.given.token(group, self.first))
            start = z.ns + tokens.start - oldest
            found = np.append(sc[head, i, : z.ns], sc[head, i, start : start + len(tokens)])
        else:
            found = sc[i, group, :count, head % z.hpg]
        return found.astype(float) * float(inv[i, head])

    def far(self, row: int, head: int) -> _Far:
        """The far part."""
        m, i = self.given.sizes.m, row - self.first
        s = self.written("s")
        if self.path == "token":
            fo, scale = self.written("fo"), self._token_scale(head)
            if fo is None or s is None or scale is None:
                return _Far(np.nan, np.nan, np.full(m, np.nan))
            c, denominator, counts = fo[head, :3].astype(float)
            top, inverse = scale
            inverse *= np.exp(c - top)
            stored = fo[head, 4 : 4 + m].astype(float)
        else:
            hd, gn, inv = self.written("hd"), self.written("gn"), self.written("inv")
            if hd is None or gn is None or inv is None or s is None:
                return _Far(np.nan, np.nan, np.full(m, np.nan))
            c, denominator, counts = hd[i, head, :3].astype(float)
            inverse, stored = float(inv[i, head]), gn[i, head].astype(float)
        if counts == 0:
            return _Far(0.0, inverse, np.zeros(m))
        _, zc, top_after, rescale = _planes(s, self.given.sizes, head)
        # What is stored counts for the chunk's evicted tokens too, but is relative to another maximum.
        lost = rescale < _TINY
        gains = np.where(lost, 0.0, stored / rescale)
        if lost.any():
            gains = np.where(lost, self._gains(row, head, c, top_after), gains)
        return _Far(denominator, inverse, gains * zc[:, i])

    def _gains(self, row: int, head: int, c: float, top: Array) -> Array:
        """Weights of sums relative to ``top``, relative to ``c``, from the landmarks: [m]."""
        z, moment = self.given.sizes, {n: self.before(n) for n in ("q", "k_tilde", "mu")}
        keys = moment["k_tilde"][head // z.hpg].astype(float)
        landmarks = self.given.scale * keys @ moment["q"][row, head].astype(float)
        exponents = landmarks[:, None] + top - c
        return np.einsum("ab,ab->b", np.exp(exponents), moment["mu"][head].astype(float))

    # -- the token path

    def _token_scale(self, head: int) -> tuple[float, float] | None:
        """What stripes and far part are brought to: their largest maximum, and the inverse of the total."""
        part, fo = self.written("part"), self.written("fo")
        if part is None or fo is None:
            return None
        maxima, sums = self._stripes(part, head)
        c, denominator, counts = fo[head, :3].astype(float)
        far = counts == 1
        top = float(np.fmax(maxima.max(), c if far else maxima.max()))
        total = (sums * np.exp(maxima - top)).sum() + (denominator * np.exp(c - top) if far else 0.0)
        return top, float(1 / np.maximum(total, _LEAST_SUM))

    def _stripes(self, part: Array, head: int) -> tuple[Array, Array]:
        """Maxima and sums of a head's stripes [32], and 0 for the sum of those that held nothing."""
        z = self.given.sizes
        mine = part[head // z.hpg, :, :, head % z.hpg, :2].reshape(-1, 2).astype(float)
        maxima, sums = mine.T
        return maxima, np.where(maxima <= _SKIPPED, 0.0, sums)

    def _by_stripe(self, row: int, head: int) -> Array:
        """Shares of sinks and window, [n]: that of a stripe, split up in float64."""
        z, given, group = self.given.sizes, self.given, head // self.given.sizes.hpg
        tokens = given.seen(group, row)
        count = z.ns + len(tokens)
        part, scale = self.written("part"), self._token_scale(head)
        if part is None or scale is None:
            return np.full(count, np.nan)
        slots = [given.slot(group, t) for t in tokens[:-1]]
        keys = [
            self.before("sink_k")[group],
            self.before("ring_k")[group, slots],
            self.before("k")[row, [group]],
        ]
        exponents = (
            given.scale * np.concatenate(keys).astype(float) @ self.before("q")[row, head].astype(float)
        )
        length = -(-count // SPLITS)
        split, inside = np.divmod(np.arange(count), length)
        of = split * STRIPES + inside % STRIPES
        largest = np.full(SPLITS * STRIPES, -np.inf)
        np.maximum.at(largest, of, exponents)
        shares = np.exp(exponents - largest[of])
        shares /= np.bincount(of, shares, SPLITS * STRIPES)[of]
        top, inverse = scale
        maxima, sums = self._stripes(part, head)
        return shares * (sums * np.exp(maxima - top) * inverse)[of]


def _check(trace: Trace, position: int) -> None:
    if not 0 <= position <= len(trace):
        raise ArgumentError(f"The trace has {len(trace)} dispatches: there is no position {position}.")


def _writer(trace: Trace, chunk: Chunk, buffer: str, position: int) -> Step | None:
    """The last step of a chunk that wrote ``buffer`` by then."""
    steps = trace[chunk.first_step : min(chunk.first_step + len(chunk.plan.dispatches), position)]
    wrote = (s for s in reversed(steps) if buffer in s.dispatch.writes and not s.fault)
    return next(wrote, None)


def _planes(s: Array, sizes: Sizes, head: int) -> tuple[Array, Array, Array, Array]:
    """A head's part of the planes of ``s`` in float64: e and zc [m][64], M' and r [m]."""
    cuts = np.cumsum([MAX_ROWS * sizes.ghm, MAX_ROWS * sizes.ghm, sizes.ghm])
    e, zc, top, r = (plane.reshape(sizes.nh, sizes.m, -1)[head] for plane in np.split(s, cuts))
    return e.astype(float), zc.astype(float), top[:, 0].astype(float), r[:, 0].astype(float)
