"""What a user is told when something of theirs is wrong: typed, short, without a traceback in notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .source.diagnostics import Diagnostic

__all__ = ["ArgumentError", "CompileError", "EngineError", "KernelFault", "LabError", "MslError"]


class LabError(Exception):
    """Base of every error of the lab. Notebooks show ``Kind: message`` in place of a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class CompileError(LabError):
    """The source does not compile. ``diagnostics`` holds each message with its place in the source."""

    def __init__(self, message: str, diagnostics: Sequence[Diagnostic] = ()) -> None:
        super().__init__(message)
        self.diagnostics = tuple(diagnostics)

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class MslError(CompileError):
    """The source asks for a part of Metal that is out of scope, such as a texture."""


class ArgumentError(LabError, TypeError):
    """An argument, grid or option does not fit the kernel. Raised before anything runs."""


class EngineError(LabError, RuntimeError):
    """An engine or its compiler is missing or broken; the message says what to install."""


class KernelFault(LabError, RuntimeError):
    """A kernel did what it must not while running. Arguments and all other arrays are as they were."""
