"""What works on this machine: versions, the engines, and the examples against float64."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

from . import cache, examples
from .engines import registry
from .errors import LabError

_PACKAGES = ("metal-kernel-lab", "mlx", "numpy", "ziglang", "llvmlite", "ipython", "jupyterlab")
_SEED = 2026


@dataclass(frozen=True)
class Report:
    """What was found. ``healthy`` is whether the engine that ``auto`` takes runs every example right."""

    facts: tuple[tuple[str, str], ...]
    checks: tuple[tuple[str, bool, str], ...]

    @property
    def healthy(self) -> bool:
        return bool(self.checks) and all(right for _, right, _ in self.checks)

    def text(self) -> str:
        """The report for a terminal."""
        wide = max(len(name) for name, _ in self.facts)
        lines = [f"{name.ljust(wide)}  {value}" for name, value in self.facts]
        lines.append("")
        wide = max((len(name) for name, _, _ in self.checks), default=0)
        for name, right, detail in self.checks:
            lines.append(f"{'ok  ' if right else 'FAIL'}  {name.ljust(wide)}  {detail}")
        lines += ["", "Everything works." if self.healthy else "Something does not work: see FAIL above."]
        return "\n".join(lines)


def examine(seed: int = _SEED) -> Report:
    """Look at this machine and run every example. Never raises for what is missing: the report says it."""
    facts = [("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")]
    facts += [(package, _version(package)) for package in _PACKAGES]
    facts.append(("cores", str(os.cpu_count())))
    facts.append(("cache", str(cache.folder())))
    try:
        engine = registry.engine("auto")
    except LabError as problem:
        return Report(tuple(facts), (("engine cpu", False, str(problem)),))
    facts.append(("engine", engine.name))
    checks = [run_example(example, seed) for example in examples.EXAMPLES]
    return Report(tuple(facts), tuple(checks))


def run_example(example: examples.Example, seed: int, engine: str = "auto") -> tuple[str, bool, str]:
    """Name, whether it is right, and in words how an example came out."""
    try:
        outcome = examples.check(example, seed, engine)
    except LabError as problem:
        return example.name, False, str(problem)
    bound = f"≤ {example.tolerance:g}" if example.tolerance else "exact"
    return (
        example.name,
        outcome.right,
        f"{example.about}: {outcome.elements} values, error {outcome.error:.1e} of the largest ({bound})",
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
