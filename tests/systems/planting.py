"""Mistakes planted in a system's kernels, and the reference that runs with them are compared with."""

from __future__ import annotations

from typing import Any

from lab import systems


def own_lines(kernel: str, text: str) -> slice:
    """Where in ``text`` the kernel stands."""
    start = text.index(f"kernel void {kernel}(")
    return slice(start, text.index("\n}\n", start) + 3)


def planted(kernel: str, text: str, right: str, wrong: str) -> str:
    """``text`` with a mistake in the kernel, or in what it uses."""
    where = own_lines(kernel, text)
    mine = text[where]
    if right in mine:
        changed = text[: where.start] + mine.replace(right, wrong) + text[where.stop :]
    else:
        changed = text.replace(right, wrong)
    assert changed != text, f"{kernel} has no {right!r} any more: plant this mistake anew"
    return changed


def remember_reference(trace: systems.Trace) -> None:
    """Have ``trace`` keep what its reference says of every chunk, for many runs with mistakes.

    Up to a run's first mistake all buffers are the same.
    """
    compute, known = trace.reference, dict[int, Any]()

    def remembered(of: systems.Trace, chunk: int) -> Any:
        if chunk not in known:
            assert compute is not None
            known[chunk] = compute(of, chunk)
        return known[chunk]

    trace.reference = remembered
