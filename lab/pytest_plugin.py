"""pytest plug-in: ``pytest -p lab.pytest_plugin`` runs tests of Metal kernels without Metal.

Importing it puts the lab in the place of MLX's Metal, before conftest files and the packages under test
are imported.
"""

from __future__ import annotations

from typing import Any

from .mlxfast import install, uninstall
from .mlxfast.kernel import HAS_METAL

_mine = install()


def pytest_configure(config: Any) -> None:
    """Show the warning about uncompiled functions, and never as an error of the package under test."""
    config.addinivalue_line("filterwarnings", "default::lab.mlxfast.stand_in.UncompiledWarning")


def pytest_report_header() -> str:
    """The line above the tests that says what runs the kernels."""
    return f"Metal kernels: {'this machine, through MLX' if HAS_METAL else 'Metal kernel lab, CPU engine'}"


def pytest_unconfigure() -> None:
    """MLX as it was."""
    if _mine:
        uninstall()
