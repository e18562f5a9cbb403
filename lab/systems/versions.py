"""Versions of buffers that share what did not change: pages of 2 KiB, each kept once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

PAGE = 2048  # bytes


@dataclass(frozen=True)
class Version:
    """One state of one buffer: its shape, NumPy's name of its dtype, and its pages by number."""

    shape: tuple[int, ...]
    dtype: str
    pages: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of its contents."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Pages:
    """The pages of all versions of one buffer."""

    def __init__(self, blocks: list[np.ndarray] | None = None) -> None:
        self._blocks = list(blocks or [])  # uint8 [pages][PAGE] each
        self._first = [0]  # the number of each block's first page, and of the next page to come
        for block in self._blocks:
            self._first.append(self._first[-1] + len(block))

    @property
    def nbytes(self) -> int:
        """Bytes that the pages take."""
        return self._first[-1] * PAGE

    def add(self, array: np.ndarray, before: Version | None = None) -> Version:
        """A version of ``array``'s contents; pages that are as in ``before`` are shared with it."""
        data = _paged(array)
        if before is None or len(before.pages) != len(data):
            fresh, pages = np.ones(len(data), bool), np.zeros(len(data), np.int32)
        else:
            fresh, pages = self.differing(data, before), before.pages.copy()
        if not fresh.any():
            same = before is not None and (before.shape, before.dtype) == (array.shape, array.dtype.name)
            return before if before is not None and same else Version(array.shape, array.dtype.name, pages)
        distinct, numbers = _distinct(data[fresh])
        pages[fresh] = self._first[-1] + numbers
        self._blocks.append(distinct)
        self._first.append(self._first[-1] + len(distinct))
        return Version(array.shape, array.dtype.name, pages)

    def differing(self, data: np.ndarray, before: Version) -> np.ndarray:
        """Which rows of ``data`` (paged bytes) are other than the pages of ``before``: bool [pages]."""
        return (data.view(np.uint64) != self._gather(before).view(np.uint64)).any(axis=1)

    def array(self, version: Version) -> np.ndarray:
        """The contents of ``version``: an array of its own."""
        data = self._gather(version).reshape(-1)[: version.nbytes]
        return data.view(version.dtype).reshape(version.shape)

    def all_pages(self) -> np.ndarray:
        """Every page: uint8 [pages][PAGE], in the order of their numbers."""
        return np.concatenate(self._blocks) if self._blocks else np.empty((0, PAGE), np.uint8)

    def _gather(self, version: Version) -> np.ndarray:
        data = np.empty((len(version.pages), PAGE), np.uint8)
        blocks = np.searchsorted(self._first, version.pages, side="right") - 1
        for block in np.unique(blocks):
            rows = blocks == block
            data[rows] = self._blocks[block][version.pages[rows] - self._first[block]]
        return data


class Store:
    """Pages by buffer name."""

    def __init__(self, pages: Mapping[str, Pages] | None = None) -> None:
        self.pages: dict[str, Pages] = dict(pages or {})

    def add(self, name: str, array: np.ndarray, before: Version | None = None) -> Version:
        """A version of the buffer ``name``."""
        return self.pages.setdefault(name, Pages()).add(array, before)

    def array(self, name: str, version: Version) -> np.ndarray:
        """The contents of a version of the buffer ``name``."""
        return self.pages[name].array(version)

    @property
    def nbytes(self) -> int:
        """Bytes that all pages take."""
        return sum(pages.nbytes for pages in self.pages.values())


def _paged(array: np.ndarray) -> np.ndarray:
    """The bytes of ``array`` as whole pages, the last one filled up with zeros: uint8 [pages][PAGE]."""
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    rows = -(-raw.size // PAGE)
    if raw.size == rows * PAGE:
        return raw.reshape(rows, PAGE)
    data = np.zeros((rows, PAGE), np.uint8)
    data.reshape(-1)[: raw.size] = raw
    return data


def _distinct(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pages without repetitions of the one before, as new memory, and the number of each page in it.

    Runs of equal pages are what buffers are full of before they are written.
    """
    new = np.ones(len(data), bool)
    new[1:] = (data[1:].view(np.uint64) != data[:-1].view(np.uint64)).any(axis=1)
    return data[new].copy(), np.cumsum(new) - 1
