"""The one error of the IR package."""

from __future__ import annotations

__all__ = ["IRError"]


class IRError(Exception):
    """A construct of the IR that this package does not know, or malformed text.

    ``construct`` names it; ``line`` is its line in the IR's text, counted from 1, None where there is none.
    """

    def __init__(self, construct: str, line: int | None = None) -> None:
        where = "" if line is None else f" (line {line} of the IR)"
        super().__init__(f"the IR holds what is not known here: {construct}{where}")
        self.construct = construct
        self.line = line
