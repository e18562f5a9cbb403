"""Sizes of a constant-memory attention layer, and the limits the kernels have."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError

PATHS = ("chunk", "matmul", "token")

MAX_ROWS = 64  # of a chunk
MAX_HEADS = 8  # of a group
MAX_LANDMARKS = 32
TOKEN_HEADS = 4
TOKEN_DIMENSIONS = (128, 256)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer.

    ``ng`` groups (KV heads) of ``hpg`` query heads, head dimension ``d``, ``w`` ring slots, ``ns`` sink
    tokens, ``m`` landmarks. ``windows`` are the groups' own windows, 0 or None for all of ``w``; ``scale``
    is what scores are multiplied with, by default 1/sqrt(d).

    Raises ArgumentError with a sentence for each limit that is violated.
    """

    ng: int
    hpg: int
    d: int
    w: int
    ns: int
    m: int
    windows: tuple[int, ...] | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        wrong = [
            f"{name} is a whole number, not {getattr(self, name)!r}."
            for name in ("ng", "hpg", "d", "w", "ns", "m")
            if not _whole(getattr(self, name))
        ]
        if wrong:
            raise ArgumentError(" ".join(wrong))
        if self.windows is not None:
            if not isinstance(self.windows, Sequence) or not all(_whole(x) for x in self.windows):
                raise ArgumentError(f"windows are whole numbers, one for each group, not {self.windows!r}.")
            object.__setattr__(self, "windows", tuple(int(x) for x in self.windows))
        if self.scale is None:
            object.__setattr__(self, "scale", self.d**-0.5 if self.d > 0 else 1.0)
        wrong = list(self._violated())
        if wrong:
            raise ArgumentError(" ".join(wrong))

    def _violated(self) -> list[str]:
        wrong = []
        for name, what, least in (
            ("ng", "groups", 1),
            ("hpg", "query heads a group", 1),
            ("d", "dimensions a head", 4),
            ("w", "ring slots", 1),
            ("ns", "sink tokens", 0),
            ("m", "landmarks", 1),
        ):
            if getattr(self, name) < least:
                wrong.append(f"{name} = {getattr(self, name)} {what}: the least is {least}.")
        if self.hpg > MAX_HEADS:
            wrong.append(f"hpg = {self.hpg} query heads a group: the kernels take at most {MAX_HEADS}.")
        if self.m > MAX_LANDMARKS:
            wrong.append(f"m = {self.m} landmarks: the kernels take at most {MAX_LANDMARKS}.")
        if self.d > 0 and self.d % 4:
            wrong.append(f"d = {self.d} dimensions a head: it must be a multiple of 4.")
        if self.windows is not None:
            if len(self.windows) != self.ng:
                wrong.append(f"windows has {len(self.windows)} entries for ng = {self.ng} groups.")
            for g, window in enumerate(self.windows):
                if not 0 <= window <= self.w:
                    wrong.append(f"The window {window} of group {g} does not fit w = {self.w} ring slots.")
        if not isinstance(self.scale, numbers.Real) or not math.isfinite(self.scale):
            wrong.append(f"scale is a finite number, not {self.scale!r}.")
        return wrong

    @property
    def nh(self) -> int:
        """Query heads; head ``h`` of group ``g`` is query head ``g*hpg + h``."""
        return self.ng * self.hpg

    @property
    def ghm(self) -> int:
        """Landmarks of all query heads."""
        return self.nh * self.m

    def window(self, group: int) -> int:
        """The slots that ``group`` uses."""
        return (self.windows[group] if self.windows else 0) or self.w

    @property
    def smallest_window(self) -> int:
        """The smallest window in use, which no chunk may exceed."""
        return min(self.window(g) for g in range(self.ng))

    @property
    def longest_chunk(self) -> int:
        """The most rows a chunk may have."""
        return min(MAX_ROWS, self.smallest_window)

    def check_chunk(self, k: int, path: str = "chunk") -> None:
        """Raise ArgumentError where ``k`` rows cannot take ``path`` at once: a sentence for each reason."""
        if path not in PATHS:
            raise ArgumentError(f"There is no path {path!r}: a chunk takes {', '.join(PATHS)}.")
        wrong = []
        if not _whole(k) or k < 1:
            wrong.append(f"A chunk has at least 1 row, not {k!r}.")
        elif k > MAX_ROWS:
            wrong.append(f"A chunk of {k} rows: the kernels take at most {MAX_ROWS}.")
        if _whole(k) and k > self.smallest_window:
            group = next(g for g in range(self.ng) if self.window(g) == self.smallest_window)
            wrong.append(
                f"A chunk of {k} rows is longer than the window of {self.smallest_window} tokens of group "
                f"{group}: it would evict rows of its own."
            )
        if path == "token":
            if _whole(k) and k > 1:
                wrong.append(f"The token path takes 1 row, not {k}.")
            if self.hpg > TOKEN_HEADS:
                wrong.append(
                    f"The token path takes hpg up to {TOKEN_HEADS} query heads a group, not {self.hpg}."
                )
            if self.d not in TOKEN_DIMENSIONS:
                allowed = " or ".join(map(str, TOKEN_DIMENSIONS))
                wrong.append(f"The token path takes d = {allowed} dimensions a head, not {self.d}.")
        if wrong:
            raise ArgumentError(" ".join(wrong))


def _whole(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
