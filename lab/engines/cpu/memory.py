"""Memory for the buffers that kernels write: far from everything else, with no access around it.

Each buffer lies at the end of its pages inside a reserved range so large that an index wrong by up to 32
bits stays in it, so that a wild access faults and no other array can change. What is left of its first
and last page holds a pattern, which shows a stray write there after the run.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import threading
from dataclasses import dataclass

import numpy as np

from ...errors import EngineError
from .native import Runtime, runtime

_RANGE = 128 << 30
_PATTERN = 0xA5
_PATTERNS = bytes([_PATTERN]) * (2 * mmap.PAGESIZE)
_KEEP = 32 << 20  # bytes that free ranges may keep open in all, so that the next buffer finds its pages there


@dataclass(frozen=True)
class Stray:
    """A write outside a buffer: the byte's offset from the buffer's start (negative: before it)."""

    offset: int


class Block:
    """One buffer in guarded memory. ``data`` is a uint8 view of its bytes."""

    def __init__(self, start: int, span: int) -> None:
        self.range = range(start, start + span)
        """The addresses reserved for it."""
        self._base = start + span // 4  # the quarter below is for indices wrong the other way
        self._open = 0
        self.address = 0
        self.nbytes = 0

    def prepare(self, nbytes: int, memory: Runtime) -> None:
        """Open enough pages for ``nbytes`` bytes, which start at a multiple of 16."""
        page = mmap.PAGESIZE
        size = max(page, -(-nbytes // page) * page)
        if size != self._open:
            if self._open:
                memory.decommit(self._base, self._open)
                self._open = 0
            if memory.commit(self._base, size) != 0:
                raise EngineError(f"There is no memory for a buffer of {nbytes} bytes.")
            self._open = size
            opened = (ctypes.c_uint8 * size).from_address(self._base)
            self._pages = np.frombuffer(memoryview(opened), np.uint8)
        offset = (size - nbytes) & ~15
        self.address, self.nbytes = self._base + offset, nbytes
        self._pages[:offset] = _PATTERN
        self._pages[offset + nbytes :] = _PATTERN
        self.data = self._pages[offset : offset + nbytes]

    def stray(self) -> Stray | None:
        """The first byte around the buffer that was written, if one was."""
        offset = self.address - self._base
        before, after = self._pages[:offset], self._pages[offset + self.nbytes :]
        if before.tobytes() + after.tobytes() == _PATTERNS[: before.size + after.size]:
            return None
        changed = np.flatnonzero(before != _PATTERN)
        if changed.size:
            return Stray(int(changed[-1]) - offset)
        return Stray(self.nbytes + int(np.flatnonzero(after != _PATTERN)[0]))

    def holds(self, nbytes: int) -> bool:
        """Whether its range is wide enough for ``nbytes`` bytes."""
        return self._base + nbytes + mmap.PAGESIZE <= self.range.stop

    @property
    def open_bytes(self) -> int:
        """Bytes of memory it holds."""
        return self._open

    def close(self, memory: Runtime) -> None:
        """Give its memory back to the system."""
        memory.decommit(self._base, self._open)
        self._open = 0


class Arena:
    """The reserved ranges of this process."""

    def __init__(self) -> None:
        self._memory = runtime()
        self._free: list[Block] = []
        self._lock = threading.Lock()
        self._span = _widest()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin_after_fork)

    def take(self, nbytes: int) -> Block:
        """A block of ``nbytes`` bytes; give it back with ``give``. Raises EngineError without memory."""
        with self._lock:
            best = self._best(nbytes)
            block = self._reserve(nbytes) if best is None else self._free.pop(best)
        try:
            block.prepare(nbytes, self._memory)
        except EngineError:
            self.give(block)
            raise
        return block

    def give(self, block: Block) -> None:
        """Take the block back."""
        with self._lock:
            if sum(b.open_bytes for b in self._free) + block.open_bytes > _KEEP:
                block.close(self._memory)
            self._free.append(block)

    def _best(self, nbytes: int) -> int | None:
        """Index of the free block whose open pages are nearest to ``nbytes``, if one holds them."""
        fit = [i for i, block in enumerate(self._free) if block.holds(nbytes)]
        return min(fit, key=lambda i: abs(self._free[i].open_bytes - nbytes)) if fit else None

    def _reserve(self, nbytes: int) -> Block:
        unit = 4 * mmap.PAGESIZE
        least = -(-(2 * nbytes + unit) // unit) * unit
        while True:
            span = max(self._span, least)
            start = self._memory.reserve(span)
            if start:
                return Block(start, span)
            if span == least:
                raise EngineError(f"There is no address space for a buffer of {nbytes} bytes.")
            self._span = self._span // 4 // unit * unit

    def _begin_after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it


def _widest() -> int:
    """Bytes per range: where address space is rationed (``ulimit -v``), most of it is left to others."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    unit = 4 * mmap.PAGESIZE
    return _RANGE if limit == resource.RLIM_INFINITY else min(_RANGE, limit // 64 // unit * unit)


@functools.cache
def arena() -> Arena:
    """The one arena of this process."""
    return Arena()
