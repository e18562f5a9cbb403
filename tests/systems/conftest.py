"""A session of the toy system, with shipped kernels."""

from __future__ import annotations

import pytest

from lab import systems
from tests.systems import toy


@pytest.fixture(scope="session")
def toy_system(tmp_path_factory: pytest.TempPathFactory) -> systems.System:
    return toy.system(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def session(toy_system: systems.System) -> systems.Session:
    return systems.Session(toy_system)
