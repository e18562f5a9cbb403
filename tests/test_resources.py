"""The files that travel with the package are found from a checkout, an editable install and a wheel alike.

Installs are made by hand, without pip or the network: the project's build backend writes the wheel, and a
purelib wheel is installed by unpacking it.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]

REPORT = """
import sys, site
before = len(sys.path)
site.addsitedir(sys.argv[1])  # follows the .pth file of an editable install, as an interpreter's start does
sys.path = sys.path[before:] + sys.path[:before]  # ahead of an install that this interpreter has
from lab import resources
print(resources.kernels(), resources.notebooks(), resources.include(), sep="\\n")
"""


def build(hook: str, folder: Path) -> Path:
    """The wheel that the build backend's `hook` (PEP 517, PEP 660) writes into `folder`."""
    code = f"import sys, hatchling.build as backend; print(backend.{hook}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    site_packages = tmp_path_factory.mktemp("site-packages")
    zipfile.ZipFile(wheel).extractall(site_packages)
    # Another distribution's folder of the same name, which must not be taken for ours.
    (site_packages / "kernels").mkdir()
    return site_packages


@pytest.fixture(scope="module")
def editable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site_packages = tmp_path_factory.mktemp("editable")
    zipfile.ZipFile(build("build_editable", tmp_path_factory.mktemp("wheel"))).extractall(site_packages)
    return site_packages


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[Path]]:
    elsewhere = tmp_path_factory.mktemp("elsewhere")

    def report(site_packages: Path) -> list[Path]:
        """What `lab.resources` answers in a process that has `site_packages` and knows no checkout."""
        done = subprocess.run(
            # -P and the folder: neither the script's nor the working directory's modules are importable.
            [sys.executable, "-P", "-c", REPORT, str(site_packages)],
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [Path(line) for line in done.stdout.splitlines()]

    return report


def names(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".ipynb_checkpoints" not in path.parts
    }


def test_a_checkout_has_its_own_folders():
    from lab import resources

    assert resources.kernels() == CHECKOUT / "kernels"
    assert resources.notebooks() == CHECKOUT / "notebooks"
    assert resources.include() == CHECKOUT / "lab" / "include"
    for folder in (resources.kernels(), resources.notebooks(), resources.include()):
        assert folder.is_dir()


def test_an_editable_install_has_the_checkout_s(editable, folders):
    assert folders(editable) == [CHECKOUT / "kernels", CHECKOUT / "notebooks", CHECKOUT / "lab" / "include"]


def test_a_wheel_has_copies_of_all_files(installed, folders):
    package = installed / "lab"
    assert folders(installed) == [package / "kernels", package / "notebooks", package / "include"]
    assert names(package / "kernels") == names(CHECKOUT / "kernels")
    assert names(package / "notebooks") == names(CHECKOUT / "notebooks")
    assert names(package / "include") == names(CHECKOUT / "lab" / "include")


def test_a_wheel_has_the_package_and_nothing_else_at_its_top(wheel):
    with zipfile.ZipFile(wheel) as archive:
        package, metadata = sorted({name.split("/")[0] for name in archive.namelist()})
        assert package == "lab"
        assert metadata.startswith("metal_kernel_lab-") and metadata.endswith(".dist-info")
        assert "lab/py.typed" in archive.namelist()
        scripts = archive.read(f"{metadata}/entry_points.txt").decode()
    assert "metal-lab = lab.cli:main" in scripts
