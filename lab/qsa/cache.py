"""The 8-bit cache of a layer, on MLX arrays."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from .. import systems
from ..errors import ArgumentError
from ..systems.arrays import as_array
from .plans import CACHE, GROUP, append_plan, check_room, system
from .reference import LEVELS, Quantised
from .sizes import Sizes

LARGEST = LEVELS * float(np.finfo(np.float16).max)  # what the largest scale can hold


class Cache:
    """Keys and values of a layer in 8 bits: its sizes, its buffers by name, and how many cells are filled.

    ``cache.kq`` and ``cache.vq`` are int8 [max_cells][qkv][qd], ``cache.ksc`` and ``cache.vsc`` their scales,
    float16 [max_cells][qkv][4], one for each 64 dimensions. Appending writes into these arrays; copy a cache
    to keep it. The float keys and values given are remembered (by reference), so that the cost of the 8 bits
    can be told.
    """

    def __init__(self, sizes: Sizes, arrays: Mapping[str, Any], cells: int) -> None:
        """A cache from arrays for all its buffers, which are copied, the first ``cells`` cells filled.

        What they were made from is not known, so they cannot be compared with it.
        """
        check_room(sizes, cells, 0)
        self.sizes = sizes
        self.cells = cells
        self.arrays: dict[str, mx.array] = {}
        for name, shape, dtype in _shapes(sizes):
            if name not in arrays:
                raise ArgumentError(f"The cache needs the buffer '{name}', {dtype} {shape}.")
            self.arrays[name] = mx.array(np.asarray(as_array(name, arrays[name], shape, dtype)))
        self._known = cells == 0
        self._given: list[tuple[Any, Any]] = []

    @classmethod
    def empty(cls, sizes: Sizes) -> Cache:
        """A cache without cells."""
        return cls(sizes, {name: np.zeros(shape, dtype) for name, shape, dtype in _shapes(sizes)}, 0)

    @classmethod
    def of(cls, sizes: Sizes, keys: Any, values: Any) -> Cache:
        """A cache of float ``keys`` and ``values`` [cells][qkv][qd]."""
        cache = cls.empty(sizes)
        cache.append(keys, values)
        return cache

    def append(self, k: Any, v: Any) -> None:
        """Put more keys and values, float32 [n][qkv][qd], into the next cells, by the shipped ``qsa_quant``.

        Raises ArgumentError where there is no room for them, and for values that 8 bits and a half scale
        cannot hold.
        """
        k, v = tokens_of(self.sizes, k, v)
        n = k.shape[0]
        plan = append_plan(self.sizes, n, self.cells)
        if n:
            arrays = {**self.arrays, "k": k, "v": v}
            _shipped().execute(plan, arrays)
            self.arrays.update((name, arrays[name]) for name in self.arrays)
        self.remember(k, v)

    def remember(self, k: mx.array, v: mx.array) -> None:
        """Note that ``k``, ``v`` [n][qkv][qd] are in the next cells now."""
        self.cells += k.shape[0]
        if k.shape[0]:
            self._given.append((k, v))

    def copy(self) -> Cache:
        """The same cells in memory of their own."""
        other = Cache(self.sizes, self.arrays, self.cells)
        other._known, other._given = self._known, list(self._given)
        return other

    def __getattr__(self, name: str) -> mx.array:
        arrays = self.__dict__.get("arrays", {})
        if name not in arrays:
            raise AttributeError(f"A cache has no {name!r}: its buffers are {', '.join(arrays)}.")
        return arrays[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.arrays]

    # ---- what is in it ---------------------------------------------------------------------------------

    @property
    def quantised(self) -> tuple[Quantised, Quantised]:
        """Keys and values of the filled cells as they are held: views of the buffers."""
        kq, vq, ksc, vsc = (np.asarray(self.arrays[name])[: self.cells] for name in CACHE)
        return Quantised(kq, ksc), Quantised(vq, vsc)

    @property
    def knows_floats(self) -> bool:
        """Whether the numbers that it was made from are known."""
        return self._known

    @property
    def floats(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values it was given, float32 [cells][qkv][qd]. Raises ArgumentError where they are not
        known."""
        if not self._known:
            raise ArgumentError(
                f"This cache was made from buffers with {self.cells} cells in them: what these were before "
                "they were rounded to 8 bits is not known."
            )
        none = np.zeros((0, self.sizes.qkv, self.sizes.qd), np.float32)
        if len(self._given) > 1:
            keys, values = (
                np.concatenate(list(map(np.asarray, side))) for side in zip(*self._given, strict=True)
            )
            self._given = [(keys, values)]
        keys, values = self._given[0] if self._given else (none, none)
        return np.asarray(keys), np.asarray(values)

    def __repr__(self) -> str:
        z = self.sizes
        return f"<qsa cache: {self.cells} of {z.max_cells} cells, qh {z.qh}, qkv {z.qkv}, qd {z.qd}>"


@functools.cache
def _shipped() -> systems.Session:
    """Where caches are made: no session that has replaced anything."""
    return systems.Session(system())


def _shapes(sizes: Sizes) -> list[tuple[str, tuple[int, ...], str]]:
    heads = sizes.max_cells, sizes.qkv
    numbers, scales = (*heads, sizes.qd), (*heads, sizes.qd // GROUP)
    return [(n, scales, "float16") if n.endswith("sc") else (n, numbers, "int8") for n in CACHE]


def tokens_of(sizes: Sizes, k: Any, v: Any) -> tuple[mx.array, mx.array]:
    """Keys and values [n][qkv][qd] as evaluated float32 arrays. Raises ArgumentError for another shape, and
    for numbers that 8 bits and a half scale cannot hold."""
    rows = int(np.shape(k)[0]) if np.ndim(k) else 0
    shape = rows, sizes.qkv, sizes.qd
    arrays = as_array("k", k, shape), as_array("v", v, shape)
    mx.eval(*arrays)
    for name, array in zip(("key", "value"), arrays, strict=True):
        bad = np.argwhere(~(np.abs(np.asarray(array)) <= LARGEST))
        if len(bad):
            token, head, dimension = bad[0].tolist()
            number = np.asarray(array)[token, head, dimension]
            raise ArgumentError(
                f"The {name} of token {token} is {number} at KV head {head}, dimension {dimension}: the "
                f"cache holds numbers up to {LARGEST:.0f}."
            )
    return arrays
