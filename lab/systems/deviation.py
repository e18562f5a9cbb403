"""How far a buffer is from what it should hold: distances of its elements, and the worst of them told."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

from .plan import Field

EPS = 2.0**-24  # a rounding, as a share of what is rounded
_LEAST = 2.0**-149  # of float32's positive values
_HUGE = 1e29  # from here on a value stands for minus or plus infinity, and says nothing of the others' size


@dataclass(frozen=True)
class Expected:
    """What a buffer should hold after a dispatch, in arrays of its shape.

    ``values`` (float64, or an integer dtype) count where ``defined`` (bool); elsewhere it may hold anything.
    ``magnitude`` (float64) is what a value is made of, its parts without their signs: a float32 computation
    is right to a small multiple of ``2**-24 * magnitude``. It is 0 where a value has to be met exactly.
    """

    values: np.ndarray
    defined: np.ndarray
    magnitude: np.ndarray


class Expectation(Protocol):
    """What a reference gives for a buffer: an ``Expected``, or anything of the same attributes."""

    @property
    def values(self) -> np.ndarray: ...
    @property
    def defined(self) -> np.ndarray: ...
    @property
    def magnitude(self) -> np.ndarray: ...


@dataclass(frozen=True)
class Deviation:
    """How far one field of a buffer is from what it should hold after a dispatch.

    The worst element has ``value`` where ``expected`` should be, at ``index`` of the buffer and, in the
    system's terms, at ``where``. Of it, ``absolute`` is the distance, ``relative`` the distance as a share of
    the largest expected value of the field, and ``roundings`` the distance in units of what one rounding of
    all that the value is made of comes to; ``tolerance`` is as many of these as are still right, and
    ``explained`` the distance they come to. ``ulp`` is the largest distance of any element in units in the
    last place of float32. ``fault`` is the message of a kernel that did not come to its end.
    """

    step: int
    kernel: str
    buffer: str
    field: str = ""
    absolute: float = 0.0
    relative: float = 0.0
    roundings: float = 0.0
    ulp: float = 0.0
    tolerance: float = 0.0
    explained: float = 0.0
    index: tuple[int, ...] = ()
    where: str = ""
    value: float = 0.0
    expected: float = 0.0
    fault: str = ""

    def as_record(self) -> dict[str, Any]:
        """The deviation in JSON's types; what is not finite as text."""
        record = asdict(self)
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                record[name] = str(value)
        return record

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Deviation:
        """The deviation that ``as_record`` told of."""
        values = {**record, "index": tuple(record["index"])}
        for name in ("absolute", "relative", "roundings", "ulp", "value", "expected"):
            values[name] = float(values[name]) if isinstance(values[name], str) else values[name]
        return cls(**values)

    @property
    def exceeds(self) -> bool:
        """Whether it is more than rounding explains."""
        return self.fault != "" or not self.roundings <= self.tolerance

    def __str__(self) -> str:
        head = f"dispatch {self.step}, {self.kernel}"
        if self.fault:
            return f"{head}: {self.fault}"
        of = f"{self.field} of {self.buffer}" if self.field else self.buffer
        off = f"off by {_number(self.absolute, 2)}, {self.relative:.2g} of the largest"
        off += f"; rounding explains {self.explained:.2g}" if self.explained else "; it has to be exact"
        found = f"is {_number(self.value)}, expected {_number(self.expected)}"
        return f"{head}: {of} at {self.where} {found} ({off})"


def _number(value: float, digits: int = 9) -> str:
    whole = float(value).is_integer() and abs(value) < 2**32
    return f"{value:.0f}" if whole else f"{value:.{digits}g}"


def severity(d: Deviation) -> float:
    """How bad a deviation is: as a multiple of its tolerance, or, where it has none, of one rounding."""
    return float("inf") if d.fault else d.roundings / (d.tolerance or 1.0)


def elements_of(array: np.ndarray, part: Field) -> np.ndarray:
    """The elements of a field, flat, in the order of its terms."""
    return array[..., part.start : part.stop].reshape(-1)


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of each element, as unsigned integers."""
    return array.view(f"u{array.dtype.itemsize}")


@dataclass(frozen=True)
class Distances:
    """How far the elements of a field are from what they should be, flat.

    ``got`` and ``want`` are all of them; ``differing`` are the indices of those that are defined and not the
    same, and of these ``off`` is the distance, ``share`` the distance as a share of the largest that is
    expected, ``many`` the distance in roundings. ``absolute``, ``relative`` and ``roundings`` are that of
    all elements: 0 where they are the same or not defined.
    """

    got: np.ndarray
    want: np.ndarray
    differing: np.ndarray
    off: np.ndarray
    share: np.ndarray
    many: np.ndarray

    @classmethod
    def of(cls, array: np.ndarray, expected: Expectation, part: Field) -> Distances:
        got, want = elements_of(array, part), elements_of(expected.values, part)
        defined, magnitude = elements_of(expected.defined, part), elements_of(expected.magnitude, part)
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            differing = np.flatnonzero((got != want.astype(got.dtype, copy=False)) & defined)
            # Most elements of a large buffer are as they were: the rest is done for the others alone.
            wide, target = got[differing].astype(np.float64), want[differing].astype(np.float64)
            both_nan = np.isnan(wide) & np.isnan(target)
            if both_nan.any():
                numbers = ~both_nan
                differing, wide, target = differing[numbers], wide[numbers], target[numbers]
            off = np.abs(wide - target)
            off[np.isnan(off)] = np.inf
            size = np.abs(target)
            share = off / np.where(size < _HUGE, _largest(want, defined), size)
            share[np.isnan(share)] = np.inf
            return cls(got, want, differing, off, share, off / (magnitude[differing] * EPS))

    @functools.cached_property
    def absolute(self) -> np.ndarray:
        return self._of_all(self.off)

    @functools.cached_property
    def relative(self) -> np.ndarray:
        return self._of_all(self.share)

    @functools.cached_property
    def roundings(self) -> np.ndarray:
        return self._of_all(self.many)

    def _of_all(self, of_differing: np.ndarray) -> np.ndarray:
        found = np.zeros(len(self.got))
        found[self.differing] = of_differing
        return found

    def at(self, element: int) -> tuple[float, float, float]:
        """The distance of one element, absolute, relative and in roundings."""
        place = int(np.searchsorted(self.differing, element))
        if place == len(self.differing) or self.differing[place] != element:
            return 0.0, 0.0, 0.0
        return float(self.off[place]), float(self.share[place]), float(self.many[place])

    @property
    def ulp(self) -> float:
        """The largest distance of any element in units in the last place of float32."""
        return _largest_ulp(self.got[self.differing], self.want[self.differing])

    @property
    def worst(self) -> int:
        """The element that is off by the most roundings; of several, by the most."""
        if not len(self.differing):
            return 0
        most = np.flatnonzero(self.many == self.many.max())
        return int(self.differing[most[self.off[most].argmax()]])


def _largest(want: np.ndarray, defined: np.ndarray) -> float:
    """The largest expected value without its sign. What stands for an infinity says nothing of the others."""
    known = want if defined.all() else want[defined]
    if known.dtype.kind != "f":
        return max(abs(float(known.max(initial=0))), abs(float(known.min(initial=0)))) or _LEAST
    size = np.abs(known)
    return float(size[size < _HUGE].max(initial=_LEAST))


def _largest_ulp(got: np.ndarray, want: np.ndarray) -> float:
    if not got.size:
        return 0.0
    if got.dtype.kind != "f":
        return float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max())
    with np.errstate(over="ignore"):
        return float(np.abs(_ordered(got.astype(np.float32)) - _ordered(want.astype(np.float32))).max())


def _ordered(values: np.ndarray) -> np.ndarray:
    """float32 as integers in the same order, so that neighbours differ by one: int64."""
    signed = values.view(np.int32).astype(np.int64)
    return np.where(signed < 0, -(signed & 0x7FFFFFFF), signed)
