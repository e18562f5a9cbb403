"""Where the files that travel with the package lie: Metal kernels, notebooks and the MSL headers.

In a wheel they are folders of the package; in a checkout, and so in an editable install, the kernels and
the notebooks lie beside it. Each function returns an absolute path to a folder, to be read only: copy what
is to be changed.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def kernels() -> Path:
    """The folder of the Metal kernels that the lab ships, `.metal` files and their references."""
    return _beside_package() / "kernels"


def notebooks() -> Path:
    """The folder of the notebooks that the lab ships."""
    return _beside_package() / "notebooks"


def include() -> Path:
    """The folder of the lab's own `metal_stdlib` headers, which MSL source is compiled with."""
    return _PACKAGE / "include"


def _beside_package() -> Path:
    # Looking for the folder itself would not do: in site-packages, `kernels` is another distribution's.
    checkout = _PACKAGE.parent
    return checkout if (checkout / "pyproject.toml").is_file() else _PACKAGE
