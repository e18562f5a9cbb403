"""Metal kernel lab: write, run, step through and debug Metal kernels on MLX arrays, on any machine."""

from .errors import ArgumentError, CompileError, EngineError, KernelFault, LabError, MslError
from .kernel import Empty, Kernel, Library, Stats, compile, empty

__all__ = [
    "ArgumentError",
    "CompileError",
    "Empty",
    "EngineError",
    "Kernel",
    "KernelFault",
    "LabError",
    "Library",
    "MslError",
    "Stats",
    "compile",
    "empty",
]
__version__ = "0.1.0"


def load_ipython_extension(shell: object) -> None:
    """``%load_ext lab``: bring ``%%metal`` and ``%metal`` to a notebook."""
    from .magic import load

    load(shell)
