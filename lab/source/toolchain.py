"""The clang inside the PyPI package ``ziglang``: where it is, and one call of it."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

from ..errors import EngineError


@functools.cache
def zig() -> Path:
    """Path of the ``zig`` executable. Raises EngineError with the command that installs it."""
    spec = util.find_spec("ziglang")
    if spec is None or not spec.submodule_search_locations:
        raise EngineError("The compiler is missing: install it with `pip install ziglang==0.17.1`.")
    path = Path(spec.submodule_search_locations[0]) / ("zig.exe" if os.name == "nt" else "zig")
    if not path.exists():
        raise EngineError(
            f"The package ziglang has no compiler in it ({path.name} is missing): reinstall it."
        )
    return path


@functools.cache
def version() -> str:
    """Version of the package that brings the compiler; part of every cache key."""
    try:
        return metadata.version("ziglang")
    except metadata.PackageNotFoundError:  # a compiler put there by hand
        return str(zig().stat().st_mtime_ns)


def clang(arguments: Sequence[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run clang with ``arguments``, ``text`` on its standard input. The caller judges the exit code."""
    return _run([str(zig()), "clang", *arguments], text)


def zig_cc(arguments: Sequence[str], cache: Path) -> subprocess.CompletedProcess[str]:
    """Run ``zig cc``, which brings the C library's headers, with its caches under ``cache``."""
    environment = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}
    return _run([str(zig()), "cc", *arguments], None, environment)


def _run(
    command: list[str], text: str | None, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            input=text or "",
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, **environment} if environment else None,
            close_fds=False,  # lets Python use posix_spawn, which is faster from a large process
        )
    except OSError as problem:
        raise EngineError(f"The compiler could not be started: {problem}.") from problem
