"""The kernels of ``kernels/o1``, dispatch by dispatch, against ``lab.o1.reference``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

import lab
from lab import resources
from lab.o1 import reference
from lab.o1.reference import Expected, History

FOLDER = resources.kernels() / "o1"
FILES = ("o1_chunk.metal", "o1_matmul.metal", "o1_token.metal")

# Roundings of a value's parts that a kernel may be off by. The magnitude takes all of them to have the same
# sign, so that few are needed.
ROUNDINGS = 6.0
EPS = 2.0**-24
END_TO_END = 2e-6  # of the largest output, for a mixing matrix without negative entries


@dataclass(frozen=True)
class Sizes:
    ng: int = 2
    hpg: int = 3
    d: int = 16
    w: int = 12
    ns: int = 2
    m: int = 5
    windows: tuple[int, ...] = ()
    scale: float | None = None

    @property
    def nh(self) -> int:
        return self.ng * self.hpg

    @property
    def smallest_window(self) -> int:
        return min(own or self.w for own in self.windows or (0,))


# ---- the dispatches, as the specification has them -----------------------------------------------------

Three = tuple[int, int, int]


@dataclass(frozen=True)
class Dispatch:
    """A kernel, its buffers by index (the parameter block comes after them), its size from (sizes, rows)."""

    kernel: str
    buffers: str
    writes: str
    size: Callable[[Sizes, int], tuple[int, ...]]
    group: int = 0  # threads of a threadgroup; 0 where the size is in threads
    rounded: str = "x"  # axes of a size in threads that may be rounded up


def _of(kernel, buffers, writes, size, group=0, rounded="x") -> Dispatch:
    return Dispatch(kernel, buffers, writes, size, group, rounded)


FAR_E = _of("o1c_far_e", "meta ring_k q_tilde mz s", "s", lambda z, k: (z.nh * z.m,))
LAND = _of("o1c_land", "q k_tilde fs", "fs", lambda z, k: (z.m, z.ng, k))
FAR = _of("o1c_far", "meta fs nm mu s hd gn cf", "hd gn cf", lambda z, k: (z.nh, k))
COMMITS = (
    _of("o1c_far_commit", "meta ring_v mz t_hat s", "mz t_hat", lambda z, k: (z.d // 4, z.nh * z.m), 0, "xy"),
    _of("o1c_ring_commit", "meta ring_k ring_v k v", "ring_k ring_v", lambda z, k: (z.d // 4, z.ng, k)),
    _of("o1c_meta", "meta", "meta", lambda z, k: (z.ng,)),
)
PATHS = {
    "chunk": (
        FAR_E,
        _of("o1c_score", "meta q ring_k sink_k k sc", "sc", lambda z, k: (z.ns + z.w, z.ng, k)),
        LAND,
        _of("o1c_max", "meta sc nm", "nm", lambda z, k: (z.nh, k), 32),
        FAR,
        _of("o1c_soft", "meta sc hd inv", "sc inv", lambda z, k: (z.nh, k), 32),
        _of("o1c_sum", "meta sc ring_v sink_v v pz", "pz", lambda z, k: (z.ng * 8 * z.d // 4, k)),
        _of(
            "o1c_add", "meta pz hd gn t_hat inv cf ring_v out", "out", lambda z, k: (z.nh * z.d // 4, k)
        ),
        *COMMITS,
    ),
    "matmul": (
        FAR_E,
        _of(
            "o1c_gather", "meta ring_k ring_v sink_k sink_v k v kp vp", "kp vp",
            lambda z, k: (z.d // 4, z.ns + z.w + k, z.ng), 0, "xyz",
        ),
        _of("matmul_scores", "q kp sc", "sc", lambda z, k: ()),
        LAND,
        _of("o1c_gmax", "meta sc nm", "nm", lambda z, k: (z.nh, k), 32),
        FAR,
        _of("o1c_gsoft", "meta sc hd inv", "sc inv", lambda z, k: (z.nh, k), 32),
        _of("matmul_values", "sc vp no", "no", lambda z, k: ()),
        _of(
            "o1c_gadd", "meta no hd gn t_hat inv cf ring_v out", "out", lambda z, k: (z.nh * z.d // 4, k)
        ),
        *COMMITS,
    ),
    "token": (
        _of(
            "o1c_tok_near", "meta q ring_k sink_k k ring_v sink_v v part", "part", lambda z, k: (z.ng, 4), 256
        ),
        _of("o1c_tok_far", "meta q k_tilde ring_k q_tilde mz mu s fo", "s fo", lambda z, k: (z.nh,), 32),
        _of("o1c_tok_merge", "meta part fo t_hat ring_v out", "out", lambda z, k: (z.nh * z.d // 4,)),
        _of(
            "o1c_tok_commit", "meta ring_k ring_v k v mz t_hat s", "meta ring_k ring_v mz t_hat",
            lambda z, k: (z.ng,), 256,
        ),
    ),
}  # fmt: skip
COPY = "o1c_copy"


@pytest.fixture(scope="module")
def kernels() -> Mapping[str, lab.Kernel]:
    libraries = [lab.compile(FOLDER / name) for name in FILES]
    return {name: kernel for library in libraries for name, kernel in library.items()}


# ---- a layer that runs them ----------------------------------------------------------------------------


@dataclass
class Layer:
    """A layer's buffers, and the history that says what they should hold.

    Scratch is full of NaN before every chunk, the ring at the start, so that a kernel which reads what nobody
    wrote shows. ``rounded`` runs with grids rounded up; ``guarded`` with copies in guarded memory.
    """

    sizes: Sizes
    kernels: Mapping[str, lab.Kernel]
    history: History
    state: dict[str, np.ndarray]
    rounded: bool = False
    guarded: bool = False
    worst: dict[str, float] = field(default_factory=dict)

    @classmethod
    def fresh(
        cls,
        sizes: Sizes,
        kernels: Mapping[str, lab.Kernel],
        rng: np.random.Generator,
        mixing: str = "positive",
        landmarks: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        **options: bool,
    ) -> Layer:
        z = sizes
        if landmarks is None:
            k_tilde, q_tilde = floats(rng, z.ng, z.m, z.d), floats(rng, z.nh, z.m, z.d)
            landmarks = (k_tilde, q_tilde, mixing_matrices(rng, z, mixing))
        sink_k, sink_v = floats(rng, z.ng, z.ns, z.d), floats(rng, z.ng, z.ns, z.d)
        windows = z.windows or (0,) * z.ng
        history = History.fresh(z, *landmarks, sink_k, sink_v, windows)
        dummy = np.full(4, np.nan, np.float32)
        state = {
            "meta": np.zeros((z.ng, 4), np.uint32),
            "ring_k": np.full((z.ng, z.w, z.d), np.nan, np.float32),
            "ring_v": np.full((z.ng, z.w, z.d), np.nan, np.float32),
            "sink_k": sink_k if z.ns else dummy,
            "sink_v": sink_v if z.ns else dummy,
            "mz": np.zeros((z.nh, 2 * z.m), np.float32),
            "t_hat": np.zeros((z.nh, z.m, z.d), np.float32),
            **dict(zip(("k_tilde", "q_tilde", "mu"), landmarks, strict=True)),
        }
        state["meta"][:, 3] = windows
        state["mz"][:, : z.m] = -np.inf
        return cls(z, kernels, history, state, **options)

    def run(
        self, path: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, rows: int
    ) -> np.ndarray:
        """Run a chunk, rows first.. of what is given; the output, as wide as q, is NaN in all other rows."""
        *_, (_, _, arrays) = self.steps(path, q, k, v, first, rows)
        return arrays["out"]

    def steps(
        self, path: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, rows: int
    ) -> Iterable[tuple[str, str, dict[str, np.ndarray]]]:
        """Run a chunk; after each dispatch its kernel, what it writes, and all buffers."""
        z = self.sizes
        arrays = self.state | scratch(z, rows) | {"q": q, "k": k, "v": v, "out": np.full_like(q, np.nan)}
        block = {
            "hpg": z.hpg, "m": z.m, "w": z.w, "ns": z.ns, "d": z.d, "nh": z.nh, "ng": z.ng, "k": rows,
            "r0": first, "ghm": z.nh * z.m, "scale": self.history.scale, "pad": 0,
        }  # fmt: skip
        if path == "matmul":
            arrays["sc"] = nan(z.nh, rows, z.ns + z.w + rows)
        for dispatch in PATHS[path]:
            if dispatch.kernel in self.kernels:
                self._run(dispatch, arrays, block)
            elif dispatch.kernel == "matmul_scores":
                mine = q[first : first + rows].reshape(rows, z.ng, z.hpg, z.d)
                products = np.einsum("kghd,gcd->ghkc", mine, arrays["kp"], optimize=True)
                arrays["sc"][:] = np.float32(self.history.scale) * products.reshape(arrays["sc"].shape)
            else:
                weights = arrays["sc"].reshape(z.ng, z.hpg, rows, -1)
                sums = np.einsum("ghkc,gcd->ghkd", weights, arrays["vp"], optimize=True)
                arrays["no"][:] = sums.reshape(arrays["no"].shape)
            yield dispatch.kernel, dispatch.writes, arrays
        self.state = {name: arrays[name] for name in self.state}
        self.history = self.history.push(k[first : first + rows], v[first : first + rows])

    def _run(self, dispatch: Dispatch, arrays: dict[str, np.ndarray], block: Mapping[str, float]) -> None:
        size = dispatch.size(self.sizes, int(block["k"]))
        how: dict[str, object]
        if dispatch.group:
            how = {"groups": size, "threadgroup": dispatch.group}
        elif self.rounded:
            axes = ["xyz".index(axis) for axis in dispatch.rounded]
            shape = {1: (64,), 2: (16, 4), 3: (8, 4, 4)}[len(size)]
            group = tuple(n if i in axes else 1 for i, n in enumerate(shape))
            how = {"groups": tuple(map(lambda a, b: -(-a // b), size, group)), "threadgroup": group}
        else:
            how = {"grid": size}
        given = [arrays[name] for name in dispatch.buffers.split()]
        kernel = self.kernels[dispatch.kernel]
        if self.guarded:
            results = kernel(*given, block, **how)
            names = [n for n in dispatch.buffers.split() if n in dispatch.writes.split()]
            for name, result in zip(names, results if len(names) > 1 else [results], strict=True):
                arrays[name] = np.array(result)
        else:
            kernel.run_(*given, block, **how)

    def check(
        self, path: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, rows: int
    ) -> np.ndarray:
        """As ``run``, and compare what every dispatch writes with the reference."""
        mine = slice(first, first + rows)
        expected = reference.expected(self.history, q[mine], k[mine], v[mine], path)
        told = []
        for kernel, writes, arrays in self.steps(path, q, k, v, first, rows):
            told.append(kernel)
            assert sorted(expected[kernel]) == sorted(writes.split())
            for name, wanted in expected[kernel].items():
                got = arrays[name]
                if name == "out":
                    others = np.delete(got, np.arange(first, first + rows), axis=0)
                    assert np.isnan(others).all(), f"{kernel} writes rows of out that are not of the chunk"
                    got = got[mine]
                self._compare(f"{kernel}.{name}", got, wanted)
        assert told == list(expected)
        return arrays["out"]

    def _compare(self, what: str, got: np.ndarray, wanted: Expected) -> None:
        assert got.size == wanted.values.size, f"{what}: {got.shape} and {wanted.values.shape}"
        got = got.reshape(wanted.values.shape)
        share = roundings(got, wanted)
        self.worst[what] = max(self.worst.get(what, 0.0), float(share.max(initial=0.0)))
        if not share.max(initial=0.0) <= ROUNDINGS:
            at = np.unravel_index(share.argmax(), share.shape)
            raise AssertionError(
                f"{what}{[int(i) for i in at]} is {got[at]:.9g}, expected {wanted.values[at]:.9g}, "
                f"{share[at]:.3g} roundings of {wanted.magnitude[at]:.3g} off; "
                f"{(share > ROUNDINGS).sum()} of {wanted.defined.sum()} elements are wrong "
                f"({self.history.pushed} tokens before the chunk, {self.sizes})"
            )


def roundings(got: np.ndarray, wanted: Expected) -> np.ndarray:
    """How many roundings of its magnitude each element is off; 0 where nothing is expected."""
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.abs(got.astype(np.float64) - wanted.values) / (EPS * wanted.magnitude)
    off = np.where(got == wanted.values, 0.0, np.where(np.isnan(off), np.inf, off))
    return np.where(wanted.defined, off, 0.0)


def nan(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float32)


def scratch(z: Sizes, rows: int) -> dict[str, np.ndarray]:
    columns = z.ns + z.w + rows
    return {
        "s": nan(130 * z.nh * z.m),
        "sc": nan(rows, z.ng, z.w + z.ns, z.hpg),
        "fs": nan(rows, z.ng, z.m, z.hpg),
        "nm": nan(rows, z.nh),
        "hd": nan(rows, z.nh, 4),
        "gn": nan(rows, z.nh, z.m),
        "cf": nan(rows, z.nh, 64),
        "inv": nan(rows, z.nh),
        "pz": nan(rows, z.ng, 8, z.hpg, z.d),
        "kp": nan(z.ng, columns, z.d),
        "vp": nan(z.ng, columns, z.d),
        "no": nan(z.nh, rows, z.d),
        "part": nan(z.ng, 4, 8, z.hpg, z.d + 4),
        "fo": nan(z.nh, 36),
    }


# ---- data ----------------------------------------------------------------------------------------------


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def mixing_matrices(rng: np.random.Generator, z: Sizes, kind: str) -> np.ndarray:
    mu = floats(rng, z.nh, z.m, z.m)
    kinds = {
        "positive": np.abs(mu),
        "signed": mu,
        "negative": -np.abs(mu),
        "zero": 0 * mu,
        "nan": np.nan * mu,
    }
    return kinds[kind]


def rows_of(rng: np.random.Generator, z: Sizes, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return floats(rng, n, z.nh, z.d), floats(rng, n, z.ng, z.d), floats(rng, n, z.ng, z.d)


def chunkings(rng: np.random.Generator, z: Sizes, total: int, paths: list[str]) -> list[tuple[str, int]]:
    """Chunks of random paths and lengths, ``total`` rows together."""
    chunks: list[tuple[str, int]] = []
    while total:
        path = paths[rng.integers(len(paths))]
        rows = 1 if path == "token" else int(rng.integers(1, min(total, z.smallest_window, 64) + 1))
        chunks.append((path, rows))
        total -= rows
    return chunks


def every_path(z: Sizes) -> list[str]:
    token = z.hpg <= 4 and z.d in (128, 256)
    return ["chunk", "matmul", *(["token"] if token else [])]


def check_sequence(
    layer: Layer, rows: tuple[np.ndarray, np.ndarray, np.ndarray], chunks: list[tuple[str, int]]
) -> float:
    """Check every dispatch of a sequence; the largest error of its output, in terms of the largest output."""
    q, k, v = rows
    outs, wanted, first = [], [], 0
    for path, count in chunks:
        before, mine = layer.history, slice(first, first + count)
        outs.append(layer.check(path, q, k, v, first, count)[mine])
        wanted.append(reference.attention(before, q[mine], k[mine], v[mine]))
        first += count
    return largest_error(np.concatenate(outs), np.concatenate(wanted))


def run_sequence(
    layer: Layer, rows: tuple[np.ndarray, np.ndarray, np.ndarray], chunks: list[tuple[str, int]]
) -> np.ndarray:
    """The output of a sequence, its dispatches not compared."""
    outs, first = [], 0
    for path, count in chunks:
        outs.append(layer.run(path, *rows, first, count)[first : first + count])
        first += count
    return np.concatenate(outs)


def largest_error(got: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


# ---- tests ---------------------------------------------------------------------------------------------


def test_the_twenty_kernels_have_the_names_and_buffers_of_the_specification(kernels):
    dispatches = {d.kernel: d for path in PATHS.values() for d in path if not d.kernel.startswith("matmul")}
    assert sorted(kernels) == sorted([*dispatches, COPY])
    assert len(kernels) == 20
    for name, dispatch in dispatches.items():
        buffers = kernels[name].signature.buffers
        assert [b.index for b in buffers] == list(range(len(buffers)))
        assert [b.name for b in buffers] == [*dispatch.buffers.split(), "u"], name
        written = [b.name for b in buffers if kernels[name].signature.writes(b)]
        assert sorted(written) == sorted(dispatch.writes.split()), name


CASES = {
    "a ring that fills and wraps": (Sizes(), 60),
    "windows that differ": (Sizes(ng=3, hpg=2, w=20, windows=(0, 7, 13)), 70),
    "no sinks": (Sizes(ns=0), 40),
    "one landmark": (Sizes(m=1), 40),
    "32 landmarks, 8 heads": (Sizes(ng=1, hpg=8, m=32, d=64), 40),
    "one head": (Sizes(hpg=1, d=4, m=3), 40),
    "one slot": (Sizes(w=1, ns=1), 10),
    "long chunks": (Sizes(w=70, d=8), 300),
    "token sizes": (Sizes(ng=2, hpg=4, d=128, w=24, ns=4, m=16), 80),
    "wide tokens": (Sizes(ng=1, hpg=3, d=256, w=9, ns=0, m=32), 40),
    "token windows": (Sizes(ng=3, hpg=1, d=128, w=40, ns=1, m=1, windows=(5, 0, 17)), 90),
    "few columns": (Sizes(ng=1, hpg=2, d=128, w=3, ns=0, m=4), 12),
}


@pytest.mark.parametrize("case", CASES)
def test_every_dispatch_holds_what_the_formulas_say(kernels, rng, case):
    sizes, total = CASES[case]
    layer = Layer.fresh(sizes, kernels, rng)
    chunks = chunkings(rng, sizes, total, every_path(sizes))
    assert check_sequence(layer, rows_of(rng, sizes, total), chunks) <= END_TO_END


@pytest.mark.parametrize("path", ["chunk", "matmul"])
def test_every_number_of_landmarks_and_heads_is_served(kernels, rng, path):
    for m in range(1, 33):
        sizes = Sizes(ng=2, hpg=1 + m % 8, d=4, w=5, ns=m % 3, m=m)
        layer = Layer.fresh(sizes, kernels, rng)
        assert check_sequence(layer, rows_of(rng, sizes, 11), [(path, 5), (path, 4), (path, 2)]) <= END_TO_END


def test_the_token_path_serves_every_number_of_landmarks_and_its_heads(kernels, rng):
    for m in range(1, 33):
        sizes = Sizes(ng=1, hpg=1 + m % 4, d=128, w=3, ns=m % 3, m=m)
        layer = Layer.fresh(sizes, kernels, rng)
        assert check_sequence(layer, rows_of(rng, sizes, 5), [("token", 1)] * 5) <= END_TO_END


@pytest.mark.parametrize("path", ["chunk", "matmul"])
def test_a_chunk_may_be_as_long_as_the_window(kernels, rng, path):
    sizes = Sizes(ng=2, hpg=2, d=8, w=80, m=4, windows=(64, 0))
    layer = Layer.fresh(sizes, kernels, rng)
    chunks = [(path, n) for n in (64, 64, 1, 64)]
    assert check_sequence(layer, rows_of(rng, sizes, 193), chunks) <= END_TO_END


@pytest.mark.parametrize("mixing", ["signed", "negative", "zero", "nan"])
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(ng=1, hpg=4, d=128, w=10, ns=1, m=8)], ids=["d16", "d128"])
def test_the_far_part_counts_where_its_denominator_is_not_below_zero(kernels, rng, sizes, mixing):
    layer = Layer.fresh(sizes, kernels, rng, mixing)
    rows = rows_of(rng, sizes, 40)
    error = check_sequence(layer, rows, chunkings(rng, sizes, 40, every_path(sizes)))
    if mixing != "signed":  # where terms cancel, the error of a row is that of the terms
        assert error <= END_TO_END


def test_the_token_path_falls_back_to_the_near_maximum_where_the_far_part_is_dropped(kernels, rng):
    sizes = Sizes(ng=1, hpg=2, d=128, w=4, ns=1, m=3)
    k_tilde, q_tilde = 30 * floats(rng, 1, 3, 128), 30 * floats(rng, 2, 3, 128)
    mu = mixing_matrices(rng, sizes, "negative")
    layer = Layer.fresh(sizes, kernels, rng, landmarks=(k_tilde, q_tilde, mu))
    # Far exponents of a hundred: relative to them the near weights would be zero in float32.
    assert check_sequence(layer, rows_of(rng, sizes, 12), [("token", 1)] * 12) <= END_TO_END


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(ng=1, hpg=3, d=128, w=10, ns=2, m=6)], ids=["d16", "d128"])
def test_exponents_that_would_overflow_do_not(kernels, rng, sizes):
    size = np.float32(6)
    k_tilde, q_tilde = (
        size * floats(rng, sizes.ng, sizes.m, sizes.d),
        size * floats(rng, sizes.nh, sizes.m, sizes.d),
    )
    mu = mixing_matrices(rng, sizes, "positive")
    layer = Layer.fresh(sizes, kernels, rng, landmarks=(k_tilde, q_tilde, mu))
    q, k, v = rows_of(rng, sizes, 60)
    q, k = size * q, size * k
    check_sequence(layer, (q, k, v), chunkings(rng, sizes, 60, every_path(sizes)))
    assert layer.state["mz"][:, : sizes.m].max() > 89  # of which exp() is more than float32 holds
    assert layer.history.scale * np.einsum("nhd,gmd->nhgm", q, k_tilde).max() > 89


@pytest.mark.parametrize("sizes", [Sizes(), Sizes(ng=1, hpg=3, d=128, w=10, ns=2, m=6)], ids=["d16", "d128"])
def test_grids_rounded_up_change_nothing_outside_their_buffers(kernels, rng, sizes):
    layer = Layer.fresh(sizes, kernels, rng, rounded=True, guarded=True)
    chunks = [(path, 1 if path == "token" else n) for path in every_path(sizes) for n in (4, 9, 7)]
    total = sum(n for _, n in chunks)
    assert check_sequence(layer, rows_of(rng, sizes, total), chunks) <= END_TO_END


def test_only_the_rows_of_the_chunk_are_read(kernels, rng):
    sizes = Sizes(ng=2, hpg=2, d=128, m=4)
    for path, count in (("chunk", 6), ("matmul", 6), ("token", 1)):
        layer = Layer.fresh(sizes, kernels, rng)
        rows = rows_of(rng, sizes, 12 + 7 + count + 5)
        run_sequence(layer, rows, [("chunk", 12), ("chunk", 7)])
        first = 19
        for x in rows:
            x[:first] = x[first + count :] = np.nan
        layer.check(path, *rows, first, count)


def test_paths_and_chunkings_agree(kernels, rng):
    sizes = Sizes(ng=2, hpg=4, d=128, w=20, ns=3, m=7, windows=(0, 16))
    rows = rows_of(rng, sizes, 75)
    ways = {
        "tokens": [("token", 1)] * 75,
        "rows": [("chunk", 1)] * 75,
        "chunks": [("chunk", 16)] * 4 + [("chunk", 11)],
        "products": [("matmul", 5)] * 15,
        "mixed": chunkings(rng, sizes, 75, every_path(sizes)),
    }
    seed = int(rng.integers(1 << 32))
    first: dict[str, np.ndarray] = {}
    for way, chunks in ways.items():
        layer = Layer.fresh(sizes, kernels, np.random.default_rng(seed))
        result = {"out": run_sequence(layer, rows, chunks), **layer.state}
        first = first or result
        for name in ("meta", "ring_k", "ring_v"):
            assert np.array_equal(result[name], first[name], equal_nan=True), (way, name)
        for name in ("out", "mz", "t_hat"):
            assert largest_error(result[name], first[name]) <= 2 * END_TO_END, (way, name)


@pytest.mark.parametrize("path", ["chunk", "matmul", "token"])
def test_evicted_landmark_keys_give_full_softmax_attention(kernels, rng, path):
    sizes = Sizes(ng=2, hpg=4, d=128, w=16, ns=2, m=12, windows=(0, 9))
    # Orthogonal landmark keys and landmark queries along them: exp(s q_tilde.k_tilde) is far from singular.
    axes = np.linalg.qr(rng.standard_normal((sizes.ng, sizes.d, sizes.m)))[0].swapaxes(1, 2)
    k_tilde = np.float32(np.sqrt(sizes.d) * axes)
    of_heads = np.repeat(k_tilde, sizes.hpg, axis=0)
    q_tilde = of_heads * rng.uniform(0.2, 0.3, (sizes.nh, 1, 1)).astype(np.float32)
    matrix = np.exp(sizes.d**-0.5 * np.einsum("hbd,had->hba", q_tilde, of_heads, dtype=float))
    assert np.linalg.cond(matrix).max() < 20
    mu = np.linalg.inv(matrix).astype(np.float32)
    layer = Layer.fresh(sizes, kernels, rng, landmarks=(k_tilde, q_tilde, mu))

    q, k, v = rows_of(rng, sizes, 80)
    for g in range(sizes.ng):  # all but the last ones, which stay in the window
        k[:71, g] = k_tilde[g, rng.integers(sizes.m, size=71)]
    wanted = reference.full_attention(layer.history, q, k, v)
    out = run_sequence(layer, (q, k, v), [("token", 1)] * 80 if path == "token" else [(path, 8)] * 10)
    assert layer.state["meta"][:, 2].min() > 60
    assert largest_error(out, wanted) <= 2e-4


def test_copy_takes_the_start_of_a_buffer(kernels, rng):
    src, dst = floats(rng, 40), nan(64)
    kernels[COPY].run_(src, dst, grid=7)
    assert np.array_equal(dst[:28], src[:28])
    assert np.isnan(dst[28:]).all()


def random_sizes(rng: np.random.Generator) -> Sizes:
    d = int(rng.choice([4, 8, 12, 64, 128, 256]))
    ng, w = int(rng.integers(1, 4)), int(rng.integers(1, 90))
    windows = tuple(int(rng.integers(0, w + 1)) for _ in range(ng)) if rng.random() < 0.5 else ()
    return Sizes(
        ng=ng,
        hpg=int(rng.integers(1, 5 if d >= 128 else 9)),
        d=d,
        w=w,
        ns=int(rng.integers(0, 6)),
        m=int(rng.integers(1, 33)),
        windows=windows,
        scale=float(rng.uniform(0.5, 1.5) * d**-0.5),
    )


@pytest.mark.parametrize(
    "number", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 200))]
)
def test_random_sizes_and_chunkings(kernels, seed, number):
    rng = np.random.default_rng([seed, number])
    sizes = random_sizes(rng)
    mixing = "signed" if rng.random() < 0.3 else "positive"
    layer = Layer.fresh(sizes, kernels, rng, mixing)
    total = int(rng.integers(1, 3 * sizes.w + 20))
    chunks = chunkings(rng, sizes, total, every_path(sizes))
    if number < 8:
        chunks = chunks[:30]  # of one slot and tokens there may be hundreds
    error = check_sequence(layer, rows_of(rng, sizes, total), chunks)
    if mixing == "positive":
        assert error <= END_TO_END


@pytest.mark.slow
def test_a_long_sequence_stays_accurate(kernels, rng):
    sizes = Sizes(ng=2, hpg=4, d=128, w=128, ns=4, m=16)
    layer = Layer.fresh(sizes, kernels, rng)
    chunks = chunkings(rng, sizes, 3000, ["chunk", "matmul", "token"])
    assert check_sequence(layer, rows_of(rng, sizes, 3000), chunks) <= END_TO_END
