"""Sizes of sparse attention over an 8-bit cache, and the limits the kernels have."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

from ..errors import ArgumentError

PATHS = ("v1", "v2", "v3")

DIMENSIONS = 256  # of a head: a thread each
BLOCK = 4  # cells that are scored and chosen together
MAX_TOKENS = 8  # of a call
MAX_LANES = 32  # cells of a chunk on v2: a lane each
MAX_HEADS = 8  # of a head group on v2: a simdgroup each
MAX_CHUNKS = 128  # on v2
HEADS_3, CELLS_3 = 12, 64  # of a KV head and of a chunk, on v3
MAX_NUMBERS = 1 << 32  # of the cache: the kernels count in 32 bits


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: the constants that its kernels are compiled for, and the room in its cache.

    ``qh`` query heads on ``qkv`` KV heads of dimension ``qd``; a token attends to at most ``qbudget`` cells,
    in chunks of ``qch`` (v1, v3) or ``qch2`` (v2), on v2 with the query heads of a KV head in ``qhg`` groups.
    The cache has room for ``max_cells``.

    Raises ArgumentError with a sentence for each limit that is violated. Those that only one path has are
    looked at when that path is asked for: ``check_path``.
    """

    qh: int = 24
    qkv: int = 2
    qd: int = 256
    qbudget: int = 2051
    qch: int = 64
    qch2: int = 32
    qhg: int = 2
    max_cells: int = 4096

    def __post_init__(self) -> None:
        wrong = [
            f"{f.name} is a whole number, not {getattr(self, f.name)!r}."
            for f in fields(self)
            if not _whole(getattr(self, f.name))
        ]
        if wrong:
            raise ArgumentError(" ".join(wrong))
        for f in fields(self):  # NumPy's as well
            object.__setattr__(self, f.name, int(getattr(self, f.name)))
        wrong = list(self._violated())
        if wrong:
            raise ArgumentError(" ".join(wrong))

    def _violated(self) -> Iterator[str]:
        for name, what in (
            ("qh", "query heads"),
            ("qkv", "KV heads"),
            ("qbudget", "cells to attend to"),
            ("qch", "cells a chunk"),
            ("qch2", "cells a chunk"),
            ("qhg", "head groups"),
            ("max_cells", "cells of the cache"),
        ):
            if getattr(self, name) < 1:
                yield f"{name} = {getattr(self, name)} {what}: the least is 1."
        if self.qd != DIMENSIONS:
            yield f"qd = {self.qd} dimensions a head: the kernels take {DIMENSIONS} and no other."
        if self.qkv > 0 and self.qh > 0 and self.qh % self.qkv:
            yield f"qh = {self.qh} query heads do not come in equal parts to qkv = {self.qkv} KV heads."
        if self.qch2 > MAX_LANES:
            yield f"qch2 = {self.qch2} cells a chunk: the kernels take at most {MAX_LANES}."
        numbers_kept = self.max_cells * self.qkv * DIMENSIONS
        if min(self.max_cells, self.qkv) > 0 and numbers_kept > MAX_NUMBERS:
            yield (
                f"max_cells = {self.max_cells} cells of {self.qkv * DIMENSIONS} numbers: the kernels count "
                f"to {MAX_NUMBERS}."
            )

    @functools.cached_property
    def defines(self) -> Mapping[str, int]:
        """The macros that the kernels are compiled with, by name."""
        names = ("qh", "qkv", "qd", "qbudget", "qch", "qch2", "qhg")
        return MappingProxyType({name.upper(): getattr(self, name) for name in names})

    @property
    def heads_per_kv(self) -> int:
        """Query heads of a KV head; query head ``h`` uses KV head ``h // heads_per_kv``."""
        return self.qh // self.qkv

    @property
    def blocks(self) -> int:
        """Entries of a token's row of block scores."""
        return self.max_cells // BLOCK + 2

    def chunk_cells(self, path: str) -> int:
        """Cells of a chunk on ``path``."""
        return self.qch2 if path == "v2" else self.qch

    def chunks(self, path: str) -> int:
        """Chunks that there is room for in a token's partials on ``path``."""
        return -(-self.qbudget // self.chunk_cells(path))

    def check_path(self, path: str) -> None:
        """Raise ArgumentError where ``path`` cannot be taken: a sentence for each reason."""
        if path not in PATHS:
            raise ArgumentError(f"There is no path {path!r}: a call takes {', '.join(PATHS)}.")
        wrong = list(self._violated_by(path))
        if wrong:
            raise ArgumentError(" ".join(wrong))

    def _violated_by(self, path: str) -> Iterator[str]:
        heads, chunks = self.heads_per_kv, self.chunks(path)
        if path == "v2":
            if heads % self.qhg:
                yield (
                    f"The path v2 cuts the {heads} query heads of a KV head into qhg = {self.qhg} equal "
                    "groups, which is not possible."
                )
            elif heads // self.qhg > MAX_HEADS:
                yield (
                    f"The path v2 takes up to {MAX_HEADS} query heads a head group, not "
                    f"qh / qkv / qhg = {heads // self.qhg}."
                )
            if chunks > MAX_CHUNKS:
                yield (
                    f"The path v2 takes up to {MAX_CHUNKS} chunks, not the {chunks} of "
                    f"qbudget = {self.qbudget} cells by qch2 = {self.qch2}."
                )
        if path == "v3":
            if heads != HEADS_3:
                yield f"The path v3 takes qh / qkv = {HEADS_3} query heads a KV head, not {heads}."
            if self.qch > CELLS_3:
                yield f"The path v3 takes qch up to {CELLS_3} cells a chunk, not {self.qch}."


def check_tokens(n_tok: object) -> None:
    """Raise ArgumentError where a call cannot have ``n_tok`` tokens."""
    if not _whole(n_tok) or not 1 <= n_tok <= MAX_TOKENS:  # type: ignore[operator]
        raise ArgumentError(f"A call has 1 to {MAX_TOKENS} tokens, not {n_tok!r}.")


def _whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
