"""What is to be seen in a trace of the o1 system, as data: the shares of a row, gains, running masses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PARTS = ("sinks", "window", "chunk", "far")


@dataclass(frozen=True)
class Weights:
    """The attention of one row and query head.

    ``columns`` says in words what each share goes to, ``parts`` (uint8) which of PARTS it belongs to. The
    shares are float64 of that length and add up to 1: ``kernel`` from the buffers that the kernels wrote, and
    ``reference``. The last one is the far field's. NaN: not written yet.
    """

    row: int
    head: int
    columns: tuple[str, ...]
    parts: np.ndarray
    kernel: np.ndarray
    reference: np.ndarray

    def split(self, side: str = "kernel") -> np.ndarray:
        """The shares of PARTS, float64 [4]; ``side`` is ``kernel`` or ``reference``."""
        shares = self.kernel if side == "kernel" else self.reference
        return np.array([shares[self.parts == part].sum() for part in range(len(PARTS))])


@dataclass(frozen=True)
class Gains:
    """What each landmark brings to the rows of a chunk, for one query head.

    ``kernel`` and ``reference``, float64 [rows][m], are shares of the row's mass; ``first`` is the first row.
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
