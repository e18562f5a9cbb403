"""From a unit to LLVM IR: the flags, the precompiled headers, and what goes wrong told in Metal's terms."""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from .. import cache, resources
from ..errors import CompileError, EngineError
from . import constants, diagnostics, toolchain
from .diagnostics import Diagnostic, Place
from .unit import Unit

MATH = {
    "safe": ("-ffp-contract=off",),
    "relaxed": (
        "-ffp-contract=fast",
        "-fno-signed-zeros",
        "-freciprocal-math",
        "-fassociative-math",
        "-fno-trapping-math",
    ),
    "fast": ("-ffp-contract=fast", "-ffast-math", "-fhonor-infinities", "-fhonor-nans"),
}

# Metal's language through C++ for OpenCL, which has real address spaces.
_LANGUAGE = (
    "-x", "clcpp", "-cl-std=clc++2021", "-Xclang", "-cl-ext=+all,-cl_khr_fp64,-__opencl_c_fp64",
    "-cl-no-stdinc", "-cl-single-precision-constant", "-fdeclspec", "-ffreestanding", "-nostdinc",
    # Arrays of MLX start at any multiple of 8: vector loads may assume no more than an element's alignment.
    "-fmax-type-align=4",
    # Kernels read memory as another type than it was written, and loop forever until they are stopped.
    "-fno-strict-aliasing", "-fno-finite-loops",
    # A null pointer is a bad address like any other, not a licence to drop code.
    "-fno-delete-null-pointer-checks",
    # Large private arrays touch every page on their way down, so that the guard below a stack is met.
    "-fstack-clash-protection",
    "-fno-caret-diagnostics", "-fdiagnostics-print-source-range-info", "-fno-color-diagnostics",
    "-fno-elide-type",
    "-ftemplate-backtrace-limit=4", "-ferror-limit=12",
    "-O2",  # always, since precompiled headers belong to one level
)  # fmt: skip
_WARNINGS = (
    "-Wno-unknown-attributes", "-Wno-ignored-attributes", "-Wno-duplicate-decl-specifier",
    "-Wno-unused-value", "-Wno-unknown-pragmas", "-Wno-invalid-offsetof", "-Wno-c++20-extensions",
    "-Wno-c++2b-extensions", "-Wno-c99-extensions", "-Werror=undefined-internal", "-Werror=undefined-inline",
    "-Wno-missing-declarations", "-Wno-undefined-var-template", "-Wno-pass-failed", "-Wno-attributes",
    "-Wno-gnu-zero-variadic-macro-arguments",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What code is made for: a clang triple and processor. ``arguments`` are clang's."""

    triple: str
    cpu: str = "native"

    @property
    def arguments(self) -> tuple[str, ...]:
        flag = "-march=" if self.triple.startswith("x86_64") else "-mcpu="
        return ("-target", self.triple, flag + self.cpu)


def host() -> Target:
    """This machine. Raises EngineError where the engine does not know it."""
    found = platform.machine().lower()
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(found, found)
    if machine not in ("x86_64", "aarch64"):
        raise EngineError(f"The CPU engine runs on x86-64 and arm64, not on {platform.machine()}.")
    if sys.platform == "darwin":
        if machine == "aarch64":
            return Target("arm64-apple-macosx13.0", "apple-m1")
        return Target("x86_64-apple-macosx13.0")
    return Target(f"{machine}-linux-gnu")


def headers_key() -> str:
    """A hash of our own headers and where they lie (precompiled headers remember their paths)."""
    include = resources.include()
    files = sorted(p for p in include.rglob("*") if p.is_file())
    stamps = tuple((str(p), s.st_size, s.st_mtime_ns) for p, s in ((p, p.stat()) for p in files))
    return _headers_key(stamps)


@functools.lru_cache(maxsize=1)  # read again only where a file has changed, as in an upgrade under a notebook
def _headers_key(stamps: tuple[tuple[str, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _, _ in stamps:
        digest.update(path.encode() + b"\0" + Path(path).read_bytes())
    return digest.hexdigest()


@functools.cache
def processor_key() -> str:
    """This machine's processor: ``native`` means another thing elsewhere, and caches may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
        return "\n".join(x for x in lines if x.startswith(("model name", "flags", "Features", "CPU ")))
    except OSError:
        return f"{platform.machine()} {platform.processor()}"


def language_flags(target: Target, math: str) -> tuple[str, ...]:
    """Clang arguments that the precompiled headers and every unit share."""
    return (*_LANGUAGE, *_WARNINGS, *target.arguments, *MATH[math])


def precompiled(target: Target, math: str) -> Path:
    """The precompiled headers for these flags, made where they are missing."""
    flags = language_flags(target, math)
    name = cache.key("pch", toolchain.version(), headers_key(), processor_key(), *flags) + ".pch"

    def make(path: Path) -> None:
        header = resources.include() / "msl_unit.h"
        making = ["-c", "-Xclang", "-emit-pch", "-Xclang", "-fno-pch-timestamp"]
        making += ["-fpch-instantiate-templates", "-I", str(header.parent)]
        done = toolchain.clang([*flags, *making, str(header), "-o", str(path)])
        if done.returncode:
            raise EngineError(f"The lab's own headers do not compile: {done.stderr.strip()[:2000]}")

    return cache.shared().path(name, make)


def compile_ir(unit: Unit, target: Target, math: str, *more: str) -> tuple[str, list[Diagnostic]]:
    """LLVM IR of ``unit`` and the warnings met; ``more`` are further arguments for clang.

    Raises CompileError in the user's terms.
    """
    for _ in range(2):  # another process may drop the headers from the cache at any time: then make them anew
        headers = precompiled(target, math)
        arguments = [*language_flags(target, math), "-include-pch", str(headers)]
        done = toolchain.clang([*arguments, *more, "-S", "-emit-llvm", "-o", "-", "-"], unit.text)
        if done.returncode == 0 or headers.exists():
            break

    def locate(file: str, line: int, column: int) -> Place | None:
        return unit.locate(line, column) if file == "<stdin>" else None

    found = diagnostics.in_users_terms(diagnostics.parse(done.stderr), locate, unit.preprocessed.line_of)
    if done.returncode:
        shown = diagnostics.errors(found)
        in_source = [d for d in shown if d.place is not None]
        if not in_source and "unterminated '#pragma" in done.stderr:  # our own lines are what comes next
            raise CompileError("error: the source ends in the middle of a declaration", found)
        shown = in_source or shown
        text = "\n".join(d.render() for d in shown) or done.stderr.strip()
        placed = [d for d in found if d.place is not None]
        raise CompileError(text or "The compiler stopped without a word.", placed or found)
    if any(unit.undefined):
        for number in sorted(constants.undefined(done.stdout)):
            raise CompileError(unit.undefined[number])
    return done.stdout, [d for d in found if d.place is not None]
