"""The three versions of a call as plans: kernels, buffers and sizes of dispatches, all as data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from .. import resources
from ..errors import ArgumentError
from ..systems.contract import Block, Contract, Scalar, Source, System, Type
from ..systems.plan import INPUT, OUTPUT, SCRATCH, STATE, Buffer, Dispatch, Field, Plan
from .sizes import BLOCK, MAX_TOKENS, Sizes, check_tokens

GROUP = 64  # dimensions that share a scale
SCORE_BLOCKS = 8  # of a threadgroup of qsa_score: a simdgroup each
THREADS = 256  # of a threadgroup
SELECTION_THREADS = 1024

CACHE = ("kq", "vq", "ksc", "vsc")
INPUTS = ("qfull", "qcur", "k", "v")

ARGUMENTS = Block("QsaArgs", (("pos0", "uint32"), ("max_cells", "uint32")))

_LINES = """
qsa_quant   x q sc first                        > q sc
qsa_score   qcur kq ksc scores args             > scores
qsa_topk    scores ids args                     > ids
qsa_topk2   scores ids args                     > ids
qsa_attn    qcur kq vq ksc vsc ids part args    > part
qsa_attn2   qcur kq vq ksc vsc ids part args    > part
qsa_attn3   qcur kq vq ksc vsc ids part args    > part
qsa_merge   part qfull xp args                  > xp
qsa_merge2  part qfull xp args                  > xp
"""


def _contract(line: str) -> Contract:
    (kernel, *buffers), writes = (side.split() for side in line.split(">"))
    return Contract(kernel, tuple(buffers), tuple(writes))


CONTRACTS: Mapping[str, Contract] = {
    contract.kernel: contract for contract in map(_contract, _LINES.strip().splitlines())
}

_TYPES: Mapping[str, Type] = {
    **dict.fromkeys(("x", "qfull", "qcur", "k", "v", "scores", "part", "xp"), "float32"),
    **dict.fromkeys(("q", "kq", "vq"), "int8"),
    **dict.fromkeys(("sc", "ksc", "vsc"), "float16"),
    "ids": "int32",
    "first": Scalar("uint32"),
    "args": ARGUMENTS,
}

# Selection, attention and merge of each path.
_KERNELS = {
    "v1": ("qsa_topk", "qsa_attn", "qsa_merge"),
    "v2": ("qsa_topk2", "qsa_attn2", "qsa_merge2"),
    "v3": ("qsa_topk2", "qsa_attn3", "qsa_merge"),
}


@functools.cache
def system() -> System:
    """The system as sessions see it: contracts, types, shipped files, and that no score may be NaN."""
    first, second = (resources.kernels() / "qsa" / name for name in ("qsa.metal", "qsa2.metal"))
    macros = ("QH", "QKV", "QD", "QBUDGET", "QCH")
    sources = (
        Source(first, macros=macros),
        Source(second, include=(first,), macros=(*macros, "QCH2", "QHG")),
    )
    return System("qsa", sources, CONTRACTS, _TYPES, checks={"qsa_score": _scores_that_are_nan})


def _scores_that_are_nan(dispatch: Dispatch, arrays: Mapping[str, np.ndarray]) -> str:
    """A selection reads entries ``0 .. n_kv >> 2`` of a token: none of them may be NaN."""
    args: Any = dispatch.constants["args"]
    scores = arrays["scores"]
    read = (args["pos0"] + np.arange(len(scores)) + 1) // BLOCK
    bad = np.argwhere(np.isnan(scores) & (np.arange(scores.shape[1]) <= read[:, None]))
    if not len(bad):
        return ""
    token, block = bad[0].tolist()
    more = f", the first of {len(bad)} such scores" if len(bad) > 1 else ""
    return (
        f"Kernel '{dispatch.kernel}' gave NaN as the score of block {block} (cells {BLOCK * block} to "
        f"{BLOCK * block + 3}) for token {token}{more}: NaN has no place in an order, so nothing is selected."
    )


# ---- plans ---------------------------------------------------------------------------------------------


def plan(sizes: Sizes, path: str, n_tok: int, pos0: int, first: int = 0) -> Plan:
    """The dispatches of a call of ``n_tok`` tokens after ``pos0`` cells, rows ``first ..`` of a sequence.

    ``path`` is ``v1``, ``v2`` or ``v3``. The buffers are those of the call: row 0 of its inputs and of ``xp``
    is its first token. Raises ArgumentError for a call that ``sizes`` or the path do not allow.
    """
    sizes.check_path(path)
    check_tokens(n_tok)
    check_room(sizes, pos0, n_tok)
    select, attend, merge = _KERNELS[path]
    args = {"args": {"pos0": pos0, "max_cells": sizes.max_cells}}

    def groups(kernel: str, *count: int, threads: int = THREADS) -> Dispatch:
        x, y, z = (*count, 1, 1)[:3]
        return CONTRACTS[kernel].dispatch(args, groups=(x, y, z), threadgroup=(threads, 1, 1))

    blocks = (pos0 + n_tok) // BLOCK + 1  # of the last token, its unfinished one included
    across = sizes.qkv * (sizes.qhg if path == "v2" else 1)
    dispatches = (
        *_quantising(sizes, n_tok, pos0),
        groups("qsa_score", -(-blocks // SCORE_BLOCKS), n_tok),
        groups(select, n_tok, threads=SELECTION_THREADS),
        groups(attend, sizes.chunks(path), across, n_tok),
        groups(merge, sizes.qh, n_tok),
    )
    return Plan(path, first, n_tok, dispatches, buffers(sizes, path, n_tok), sizes.defines)


def plans(
    sizes: Sizes, rows: int, pos0: int, tokens: Any = None, path: str | Sequence[str] = "v2"
) -> list[Plan]:
    """Plans for ``rows`` tokens after ``pos0`` cells, call after call.

    ``tokens`` is how many a call takes (the last one may take fewer) or a list of such numbers, which must
    add up; by default as many as a call may have. ``path`` is one for all calls or a list of as many.
    """
    if tokens is None:
        tokens = MAX_TOKENS
    if isinstance(tokens, Sequence) or np.ndim(tokens):
        lengths = list(tokens)
        for n_tok in lengths:
            check_tokens(n_tok)
        if sum(lengths) != rows:
            raise ArgumentError(f"The calls have {sum(lengths)} tokens together, the inputs {rows}.")
    else:
        check_tokens(tokens)
        lengths = [min(tokens, rows - start) for start in range(0, rows, tokens)]
    paths = [path] * len(lengths) if isinstance(path, str) else list(path)
    if len(paths) != len(lengths):
        raise ArgumentError(f"There are {len(paths)} paths for {len(lengths)} calls.")
    check_room(sizes, pos0, rows)
    starts = accumulate(map(int, lengths), initial=0)
    return [
        plan(sizes, p, stop - start, pos0 + start, start)
        for p, (start, stop) in zip(paths, pairwise(starts), strict=True)
    ]


def append_plan(sizes: Sizes, n: int, first_cell: int) -> Plan:
    """The dispatches that put ``n`` keys and values into cells ``first_cell ..`` of the cache."""
    check_room(sizes, first_cell, n)
    dispatches = _quantising(sizes, n, first_cell)
    return Plan("append", 0, n, dispatches, _cache_buffers(sizes, n), sizes.defines)


def cells_before(plan: Plan) -> int:
    """How many cells the cache has before the plan: ``pos0``."""
    first: Any = plan.dispatches[0].constants["first"]
    return int(first)


def check_room(sizes: Sizes, cells: int, more: int) -> None:
    """Raise ArgumentError where a cache of ``cells`` cells has no room for ``more``."""
    if cells < 0:
        raise ArgumentError(f"There are no {cells} cells before a call.")
    if cells + more > sizes.max_cells:
        raise ArgumentError(
            f"The cache has room for max_cells = {sizes.max_cells} cells: {cells} are there, {more} more do "
            "not fit."
        )


def _quantising(sizes: Sizes, n: int, first: int) -> tuple[Dispatch, ...]:
    threads = n * sizes.qkv * (sizes.qd // GROUP)
    size: dict[str, Any] = {"grid": (threads, 1, 1), "threadgroup": (min(THREADS, max(1, threads)), 1, 1)}
    quantise = CONTRACTS["qsa_quant"]
    return tuple(
        quantise.dispatch({"first": first}, **size, names={"x": x, "q": q, "sc": scale})
        for x, q, scale in (("k", "kq", "ksc"), ("v", "vq", "vsc"))
    )


# ---- buffers -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def buffers(sizes: Sizes, path: str, n_tok: int) -> Mapping[str, Buffer]:
    """The buffers of a call of ``n_tok`` tokens on ``path``, by name."""
    z, length = sizes, sizes.chunk_cells(path)
    token, head, dimension = ("token", n_tok), ("head", z.qh), ("dimension", z.qd)
    chunks = ("chunk", z.chunks(path))
    mean = _roundings(z.qd + BLOCK), "sums of products with sums of four cells, in any order"
    products = _roundings(z.qd), "sums of qd products, in any order"
    sums = (
        _roundings(z.qd + length),
        "weights, exponentials of sums of qd products, added up over a chunk's cells",
    )
    merged = _roundings(z.chunks(path)), "weights of the chunks and what they add up to, in any order"

    def floats(name: str, *terms: tuple[str, int], role: str, tolerance: Any = (0.0, "")) -> Buffer:
        return Buffer.whole(name, "float32", tuple(size for _, size in terms), role, terms, *tolerance)

    of_chunk = token, chunks, head
    fields = (
        Field("values", 0, z.qd, (*of_chunk, dimension), *sums),
        Field("max", z.qd, z.qd + 1, of_chunk, *products),
        Field("sum", z.qd + 1, z.qd + 2, of_chunk, *sums),
    )
    found = [
        floats("qfull", token, head, ("query, then gate", 2 * z.qd), role=INPUT),
        floats("qcur", token, head, dimension, role=INPUT),
        floats("scores", token, ("block", z.blocks), role=SCRATCH, tolerance=mean),
        Buffer.whole("ids", "int32", (n_tok, z.qbudget), SCRATCH, (token, ("entry", z.qbudget))),
        Buffer("part", "float32", (n_tok, z.chunks(path), z.qh, z.qd + 2), SCRATCH, fields),
        floats("xp", token, head, dimension, role=OUTPUT, tolerance=merged),
    ]
    return {**_cache_buffers(sizes, n_tok), **{b.name: b for b in found}}


@functools.lru_cache(maxsize=256)
def _cache_buffers(sizes: Sizes, n: int) -> Mapping[str, Buffer]:
    """The cache, and ``n`` keys and values for it."""
    z = sizes
    cell, kv, dimension = ("cell", z.max_cells), ("KV head", z.qkv), ("dimension", z.qd)
    groups = ("group of 64", z.qd // GROUP)
    either = 1.0, "either neighbour is right where the rounding of a float32 quotient is undecided"
    found = []
    for x, q, scale in (("k", "kq", "ksc"), ("v", "vq", "vsc")):
        found += [
            Buffer.whole(x, "float32", (n, z.qkv, z.qd), INPUT, (("token", n), kv, dimension)),
            Buffer.whole(q, "int8", (z.max_cells, z.qkv, z.qd), STATE, (cell, kv, dimension), *either),
            Buffer.whole(scale, "float16", (*_sizes(cell, kv, groups),), STATE, (cell, kv, groups), *either),
        ]
    return {b.name: b for b in found}


def _sizes(*terms: tuple[str, int]) -> tuple[int, ...]:
    return tuple(size for _, size in terms)


def _roundings(terms: int) -> float:
    """How many roundings a sum of ``terms`` may be off, in whatever order it was made: a few, and what so
    many independent ones come to, three times over."""
    return 4 + terms**0.5
