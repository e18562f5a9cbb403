"""``metal-lab``: the lab on the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import doctor, examples
from .errors import LabError


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="metal-lab", description="Metal compute kernels on MLX arrays, on any machine."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="compile and run the example kernels and show that they are right"
    )
    demo.add_argument("--seed", type=int, default=0, help="seed of the inputs (default: 0)")
    commands.add_parser("doctor", help="say what works on this machine")
    options = parser.parse_args(arguments)
    try:
        return _demo(options.seed) if options.command == "demo" else _doctor()
    except LabError as problem:
        print("\n".join(problem._render_traceback_()), file=sys.stderr)
        return 1


def _demo(seed: int) -> int:
    print(f"Metal kernels on MLX arrays, against float64 references (seed {seed}):\n")
    right = True
    for example in examples.EXAMPLES:
        name, ok, detail = doctor.run_example(example, seed)
        kernel = example.library()[example.kernel]
        stats = kernel.stats
        how = f"{stats.engine}, {stats.executor}, {stats.run_seconds * 1e3:.2f} ms" if stats else ""
        print(f"{'ok  ' if ok else 'FAIL'}  {name:<12}{detail}  [{how}]")
        right = right and ok
    print("\nEvery kernel is right." if right else "\nSome kernel is wrong: `metal-lab doctor` says more.")
    return 0 if right else 1


def _doctor() -> int:
    report = doctor.examine()
    print(report.text())
    return 0 if report.healthy else 1
