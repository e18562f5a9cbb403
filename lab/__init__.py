"""Metal kernel lab: write, run, step through and debug Metal kernels on MLX arrays, on any machine."""

import importlib
from types import ModuleType

from .errors import ArgumentError, CompileError, EngineError, KernelFault, LabError, MslError
from .kernel import Empty, Kernel, Library, Stats, compile, empty
from .mlxfast import install, installed, metal_kernel, uninstall

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
    "install",
    "installed",
    "metal_kernel",
    "uninstall",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    # The attention systems are loaded when they are first named.
    if name in ("o1", "qsa"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: object) -> None:
    """``%load_ext lab``: bring ``%%metal`` and ``%metal`` to a notebook."""
    from .magic import load

    load(shell)
