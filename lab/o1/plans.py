"""The three paths of a chunk as plans: kernels, buffers and sizes of dispatches, all as data."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from .. import resources
from ..errors import ArgumentError
from ..systems.contract import Block, Contract, Source, System
from ..systems.plan import INPUT, OUTPUT, SCRATCH, STATE, Buffer, Dispatch, Field, Plan
from .sizes import MAX_ROWS, Sizes

PIECES = 8  # of a row's near columns, in o1c_sum
SPLITS, STRIPES = 4, 8  # of them in o1c_tok_near: threadgroups a group, simdgroups a threadgroup
FAR_WORDS = 36  # of a query head in fo
PART_VALUES = 4  # words before the values in part
LANES = 32

PARAMETERS = Block(
    "OC",
    (
        *((name, "uint32") for name in ("hpg", "m", "w", "ns", "d", "nh", "ng", "k", "r0", "ghm")),
        ("scale", "float32"),
        ("pad", "uint32"),
    ),
)

_LINES = """
o1c_far_e       meta ring_k q_tilde mz s u                                    > s
o1c_score       meta q ring_k sink_k k sc u                                   > sc
o1c_land        q k_tilde fs u                                                > fs
o1c_max         meta sc nm u                                                  > nm
o1c_far         meta fs nm mu s hd gn cf u                                    > hd gn cf
o1c_soft        meta sc hd inv u                                              > sc inv
o1c_sum         meta sc ring_v sink_v v pz u                                  > pz
o1c_add         meta pz hd gn t_hat inv cf ring_v out u                       > out
o1c_far_commit  meta ring_v mz t_hat s u                                      > mz t_hat
o1c_ring_commit meta ring_k ring_v k v u                                      > ring_k ring_v
o1c_meta        meta u                                                        > meta
o1c_copy        src dst                                                       > dst
o1c_gather      meta ring_k ring_v sink_k sink_v k v kp vp u                  > kp vp
o1c_gmax        meta sc nm u                                                  > nm
o1c_gsoft       meta sc hd inv u                                              > sc inv
o1c_gadd        meta no hd gn t_hat inv cf ring_v out u                       > out
o1c_tok_near    meta q ring_k sink_k k ring_v sink_v v part u                 > part
o1c_tok_far     meta q k_tilde ring_k q_tilde mz mu s fo u                    > s fo
o1c_tok_merge   meta part fo t_hat ring_v out u                               > out
o1c_tok_commit  meta ring_k ring_v k v mz t_hat s u                           > meta ring_k ring_v mz t_hat
"""


def _contract(line: str) -> Contract:
    (kernel, *buffers), writes = (side.split() for side in line.split(">"))
    return Contract(kernel, tuple(buffers), tuple(writes))


CONTRACTS: Mapping[str, Contract] = {
    contract.kernel: contract for contract in map(_contract, _LINES.strip().splitlines())
}

_FLOATS = (
    "ring_k ring_v sink_k sink_v k_tilde q_tilde mu mz t_hat q k v out "
    "s sc fs nm hd gn cf inv pz kp vp no part fo src dst"
)


@functools.cache
def system() -> System:
    """The system as sessions see it: contracts, types, shipped files, host products."""
    files = sorted((resources.kernels() / "o1").glob("*.metal"))
    types: dict[str, str | Block] = {name: "float32" for name in _FLOATS.split()}
    return System(
        "o1",
        tuple(Source(path) for path in files),
        CONTRACTS,
        {**types, "meta": "uint32", "u": PARAMETERS},
        {"matmul_scores": _scores_product, "matmul_values": _values_product},
    )


# ---- plans ---------------------------------------------------------------------------------------------


def plan(sizes: Sizes, path: str, k: int, r0: int = 0, rows: int | None = None) -> Plan:
    """The dispatches for a chunk of ``k`` rows from row ``r0`` of inputs that have ``rows`` rows.

    ``path`` is ``chunk``, ``matmul`` or ``token``. Raises ArgumentError for a chunk that ``sizes`` or the
    path do not allow.
    """
    sizes.check_chunk(k, path)
    total = r0 + k if rows is None else rows
    if not 0 <= r0 <= total - k:
        raise ArgumentError(f"A chunk of {k} rows from row {r0} does not lie within {total} rows.")
    dispatches = tuple(_at_row(d, r0) for d in _dispatches(sizes, path, k))
    return Plan(path, r0, k, dispatches, buffers(sizes, path, k, total))


def plans(sizes: Sizes, rows: int, chunks: Any = None, path: str | Sequence[str] = "chunk") -> list[Plan]:
    """Plans for ``rows`` rows, chunk after chunk.

    ``chunks`` is the rows of a chunk (the last one may have fewer) or a list of them, which must add up;
    by default as many as a chunk may have, and 1 on the token path. ``path`` is one for all chunks or a
    list of as many.
    """
    single = isinstance(path, str)
    if chunks is None:
        chunks = 1 if path == "token" else sizes.longest_chunk
    if isinstance(chunks, Sequence) or np.ndim(chunks):
        lengths = [int(k) for k in chunks]
        if sum(lengths) != rows:
            raise ArgumentError(f"The chunks have {sum(lengths)} rows together, the inputs {rows}.")
    else:
        sizes.check_chunk(chunks)
        lengths = [min(chunks, rows - start) for start in range(0, rows, chunks)]
    paths = [str(path)] * len(lengths) if single else list(path)
    if len(paths) != len(lengths):
        raise ArgumentError(f"There are {len(paths)} paths for {len(lengths)} chunks.")
    starts = np.cumsum([0, *lengths]).tolist()
    return [
        plan(sizes, p, stop - start, start, rows)
        for p, (start, stop) in zip(paths, pairwise(starts), strict=True)
    ]


def _at_row(dispatch: Dispatch, r0: int) -> Dispatch:
    if r0 == 0:
        return dispatch
    block = dispatch.constants["u"]
    assert isinstance(block, Mapping)
    return replace(dispatch, constants={"u": {**block, "r0": r0}})


@functools.lru_cache(maxsize=256)
def _dispatches(sizes: Sizes, path: str, k: int) -> tuple[Dispatch, ...]:
    z, d4 = sizes, sizes.d // 4
    block = {
        **{name: getattr(z, name) for name in ("hpg", "m", "w", "ns", "d", "nh", "ng")},
        **{"k": k, "r0": 0, "ghm": z.ghm, "scale": z.scale, "pad": 0},
    }
    ncap = z.ns + z.w + k

    def threads(kernel: str, *grid: int) -> Dispatch:
        x, y, depth = (*grid, 1, 1)[:3]
        shape = (min(256, _rounded(x)), 1, 1)
        return CONTRACTS[kernel].dispatch({"u": block}, grid=(x, y, depth), threadgroup=shape)

    def groups(kernel: str, count: tuple[int, int], size: int) -> Dispatch:
        return CONTRACTS[kernel].dispatch({"u": block}, groups=(*count, 1), threadgroup=(size, 1, 1))

    def host(name: str, reads: tuple[str, ...], writes: str) -> Dispatch:
        return Dispatch(name, (*reads, writes), (writes,), constants={"u": block}, host=name)

    commits = (
        threads("o1c_far_commit", d4, z.ghm),
        threads("o1c_ring_commit", d4, z.ng, k),
        threads("o1c_meta", z.ng),
    )
    if path == "token":
        return (
            groups("o1c_tok_near", (z.ng, SPLITS), STRIPES * LANES),
            groups("o1c_tok_far", (z.nh, 1), LANES),
            threads("o1c_tok_merge", z.nh * d4),
            groups("o1c_tok_commit", (z.ng, 1), 256),
        )
    far_e = threads("o1c_far_e", z.ghm)
    land = threads("o1c_land", z.m, z.ng, k)
    far = threads("o1c_far", z.nh, k)
    if path == "matmul":
        return (
            far_e,
            threads("o1c_gather", d4, ncap, z.ng),
            host("matmul_scores", ("q", "kp"), "sc"),
            land,
            groups("o1c_gmax", (z.nh, k), LANES),
            far,
            groups("o1c_gsoft", (z.nh, k), LANES),
            host("matmul_values", ("sc", "vp"), "no"),
            threads("o1c_gadd", z.nh * d4, k),
            *commits,
        )
    return (
        far_e,
        threads("o1c_score", z.ns + z.w, z.ng, k),
        land,
        groups("o1c_max", (z.nh, k), LANES),
        far,
        groups("o1c_soft", (z.nh, k), LANES),
        threads("o1c_sum", z.ng * PIECES * d4, k),
        threads("o1c_add", z.nh * d4, k),
        *commits,
    )


def _rounded(threads: int) -> int:
    """Whole simdgroups."""
    return -(-threads // LANES) * LANES


# ---- buffers -------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def buffers(sizes: Sizes, path: str, k: int, rows: int) -> Mapping[str, Buffer]:
    """The buffers of a chunk of ``k`` rows on ``path``, for inputs of ``rows`` rows, by name."""
    z = sizes
    heads = (("group", z.ng), ("head", z.hpg))
    group, head, slot = ("group", z.ng), ("head", z.hpg), ("slot", z.w)
    landmark, dimension, row = ("landmark", z.m), ("dimension", z.d), ("row", k)
    near = z.ns + z.w
    products = _roundings(z.d), "sums of d products, in any order"
    weights = _roundings(z.d), "an exponential of a sum of d products, and of a maximum of such"
    masses = _roundings(max(near, z.m) + z.d), "weights added up over landmarks or columns, in any order"
    sums = _roundings(near + z.d), "weights and what they add up to over the columns, in any order"

    def field(
        name: str, start: int, *terms: tuple[str, int], length: int = 1, tolerance: Any = (0.0, "")
    ) -> Field:
        return Field(name, start, start + length, terms, *tolerance)

    def plain(name: str, *terms: tuple[str, int], role: str = STATE, tolerance: Any = (0.0, "")) -> Buffer:
        shape = tuple(size for _, size in _joined(terms))
        return Buffer.whole(name, "float32", shape, role, terms, *tolerance)

    def scratch(name: str, *terms: tuple[str, int], tolerance: Any) -> Buffer:
        return plain(name, *terms, role=SCRATCH, tolerance=tolerance)

    def of_heads(name: str, shape: tuple[int, ...], *fields: Field, role: str = SCRATCH) -> Buffer:
        return Buffer(name, "float32", shape, role, fields)

    words = tuple(field(name, i, group) for i, name in enumerate(("len", "head", "far", "window")))
    found = [
        Buffer("meta", "uint32", (z.ng, 4), STATE, words),
        plain("ring_k", group, slot, dimension),
        plain("ring_v", group, slot, dimension),
        plain("sink_k", group, ("sink", z.ns), dimension),
        plain("sink_v", group, ("sink", z.ns), dimension),
        plain("k_tilde", group, landmark, dimension),
        plain("q_tilde", *heads, landmark, dimension),
        plain("mu", *heads, ("key landmark", z.m), ("query landmark", z.m)),
        of_heads(
            "mz",
            (z.nh, 2 * z.m),
            field("M", 0, *heads, landmark, length=z.m, tolerance=products),
            field("z", z.m, *heads, landmark, length=z.m, tolerance=weights),
            role=STATE,
        ),
        plain("t_hat", *heads, landmark, dimension, tolerance=weights),
        plain("q", ("row", rows), *heads, dimension, role=INPUT),
        plain("k", ("row", rows), group, dimension, role=INPUT),
        plain("v", ("row", rows), group, dimension, role=INPUT),
        plain("out", ("row", rows), *heads, dimension, role=OUTPUT, tolerance=sums),
        of_heads(
            "s",
            (130 * z.ghm,),
            *_planes(z, heads, landmark, products, weights),
        ),
    ]
    if path == "token":
        stripes = (group, ("split", SPLITS), ("stripe", STRIPES), head)
        found += [
            of_heads(
                "part",
                (z.ng, SPLITS, STRIPES, z.hpg, z.d + PART_VALUES),
                field("max", 0, *stripes, tolerance=products),
                field("sum", 1, *stripes, tolerance=sums),
                field("values", PART_VALUES, *stripes, dimension, length=z.d, tolerance=sums),
            ),
            of_heads(
                "fo",
                (z.nh, FAR_WORDS),
                field("max", 0, *heads, tolerance=products),
                field("far denominator", 1, *heads, tolerance=masses),
                field("counts", 2, *heads),
                field("weight of the evicted row", 3, *heads, tolerance=masses),
                field("gains", 4, *heads, landmark, length=z.m, tolerance=masses),
            ),
        ]
        return {b.name: b for b in found}
    found += [
        scratch("fs", row, group, landmark, head, tolerance=products),
        scratch("nm", row, *heads, tolerance=products),
        of_heads(
            "hd",
            (k, z.nh, 4),
            field("c", 0, row, *heads, tolerance=products),
            field("far denominator", 1, row, *heads, tolerance=masses),
            field("counts", 2, row, *heads),
            field("fourth word", 3, row, *heads),
        ),
        scratch("gn", row, *heads, landmark, tolerance=masses),
        scratch("cf", row, *heads, ("evicting row", MAX_ROWS), tolerance=masses),
        scratch("inv", row, *heads, tolerance=sums),
    ]
    if path == "matmul":
        column = ("column", near + k)
        found += [
            scratch("kp", group, column, dimension, tolerance=(0.0, "")),
            scratch("vp", group, column, dimension, tolerance=(0.0, "")),
            scratch("sc", *heads, row, column, tolerance=weights),
            scratch("no", *heads, row, dimension, tolerance=sums),
        ]
    else:
        found += [
            scratch("sc", row, group, ("column", near), head, tolerance=weights),
            scratch("pz", row, group, ("piece", PIECES), head, dimension, tolerance=sums),
        ]
    return {b.name: b for b in found}


def _roundings(terms: int) -> float:
    """How many roundings a sum of ``terms`` may be off, in whatever order it was made: a few, and what so
    many independent ones come to, three times over."""
    return 4 + terms**0.5


def _joined(terms: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """The axes of an array whose elements count by ``terms``: group and head next to it are one axis."""
    axes: list[tuple[str, int]] = []
    for name, size in terms:
        if name == "head" and axes and axes[-1][0] == "group":
            axes[-1] = ("query head", axes[-1][1] * size)
        else:
            axes.append((name, size))
    return axes


def _planes(
    z: Sizes, heads: Sequence[tuple[str, int]], landmark: tuple[str, int], products: Any, weights: Any
) -> tuple[Field, ...]:
    """The four planes of ``s``."""
    by_row = (*heads, landmark, ("row", MAX_ROWS))
    by_landmark = (*heads, landmark)
    cuts = np.cumsum([0, MAX_ROWS * z.ghm, MAX_ROWS * z.ghm, z.ghm, z.ghm]).tolist()
    names = ("e", "zc", "M'", "r")
    terms = (by_row, by_row, by_landmark, by_landmark)
    tolerances = (weights, weights, products, weights)
    return tuple(
        Field(name, start, stop, of, *tolerance)
        for name, (start, stop), of, tolerance in zip(names, pairwise(cuts), terms, tolerances, strict=True)
    )


# ---- the host's products -------------------------------------------------------------------------------


def _scores_product(dispatch: Dispatch, arrays: Mapping[str, Any], engine: str) -> Mapping[str, Any]:
    """sc [nh][k][ncap] = scale Q K^T; head ``gh`` of rows ``r0 ..`` of q against panel ``gh / hpg`` of kp."""
    u: Any = dispatch.constants["u"]
    q, kp = arrays["q"][u["r0"] : u["r0"] + u["k"]], arrays["kp"]
    by_group = q.transpose(1, 0, 2).reshape(u["ng"], u["hpg"] * u["k"], u["d"])
    scaled = by_group * np.float32(u["scale"]).item()
    return {"sc": _product(scaled, kp.transpose(0, 2, 1), (u["nh"], u["k"], -1), arrays["sc"], engine)}


def _values_product(dispatch: Dispatch, arrays: Mapping[str, Any], engine: str) -> Mapping[str, Any]:
    """no [nh][k][d] = P V, with P the weights in sc."""
    u: Any = dispatch.constants["u"]
    weights = arrays["sc"].reshape(u["ng"], u["hpg"] * u["k"], -1)
    return {"no": _product(weights, arrays["vp"], (u["nh"], u["k"], u["d"]), arrays["no"], engine)}


def _product(a: Any, b: Any, shape: tuple[int, ...], out: Any, engine: str) -> Any:
    """``a @ b`` in ``shape``: NumPy's, into ``out``, on the CPU engine; elsewhere MLX's, a new array."""
    if engine != "cpu":
        return (a @ b).reshape(shape)
    np.matmul(a, b, out=out.reshape(*a.shape[:2], b.shape[2]))
    return out
