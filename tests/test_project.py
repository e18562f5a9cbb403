"""The files that say what the project needs agree with each other and with what is installed."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import llvmlite.binding
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
CPU_EXTRAS = ("cpu", "notebook", "test", "bench")


def declared(*extras: str) -> list[Requirement]:
    """The core's requirements and those of `extras`, as pyproject.toml has them."""
    lines = PROJECT["dependencies"] + [
        line for extra in extras for line in PROJECT["optional-dependencies"][extra]
    ]
    return [Requirement(line) for line in lines]


def merged(requirements: list[Requirement]) -> dict[str, tuple[set[str], SpecifierSet]]:
    """Name to extras and versions, with the requirements of one name taken together."""
    table: dict[str, tuple[set[str], SpecifierSet]] = {}
    for requirement in requirements:
        extras, versions = table.get(canonicalize_name(requirement.name), (set(), SpecifierSet()))
        table[canonicalize_name(requirement.name)] = (
            extras | requirement.extras,
            versions & requirement.specifier,
        )
    return table


def locked() -> dict[str, list[str]]:
    """Name to the pinned versions: several where markers choose among them."""
    pins: dict[str, list[str]] = {}
    for name, version in re.findall(
        r"^([\w.-]+)==(\S+)", (CHECKOUT / "requirements.lock").read_text(), re.MULTILINE
    ):
        pins.setdefault(canonicalize_name(name), []).append(version)
    return pins


def test_conda_environment_agrees_with_pyproject():
    listed = yaml.safe_load((CHECKOUT / "environment.yml").read_text())["dependencies"]
    conda = [Requirement(line) for line in listed if isinstance(line, str) and line != "pip"]
    (pip,) = [entry["pip"] for entry in listed if isinstance(entry, dict)]
    assert "-e ." in pip
    table = merged(conda + [Requirement(line) for line in pip if line != "-e ."])
    assert table.pop("python") == (set(), SpecifierSet(PROJECT["requires-python"]))
    assert table == merged(declared("cpu", "notebook"))


def test_package_imports_only_what_is_declared():
    imported = set()
    for path in (CHECKOUT / "lab").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"lab"}
    distributions = importlib.metadata.packages_distributions()
    known = set(merged(declared("notebook")))
    brought = {name: {canonicalize_name(d) for d in distributions.get(name, [name])} for name in foreign}
    assert [name for name in sorted(foreign) if not known & brought[name]] == []


@pytest.mark.parametrize("requirement", declared(*CPU_EXTRAS), ids=str)
def test_lock_pins_every_dependency(requirement):
    versions = locked()[canonicalize_name(requirement.name)]
    assert all(requirement.specifier.contains(version) for version in versions)


def test_lock_has_hashes_and_no_addresses():
    text = (CHECKOUT / "requirements.lock").read_text()
    entries = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)[1:]
    assert len(entries) == sum(len(versions) for versions in locked().values())
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []
    assert "://" not in text
    assert not re.search(r"^\s*-[a-z-]*(index|find-links|f |i )", text, re.MULTILINE)


def test_clang_and_llvmlite_are_the_same_llvm():
    printed = subprocess.run(
        [sys.executable, "-m", "ziglang", "clang", "--version"], capture_output=True, text=True, check=True
    ).stdout
    clang = re.search(r"clang version (\d+)\.", printed)
    assert clang, printed
    assert int(clang[1]) == llvmlite.binding.llvm_version_info[0]
