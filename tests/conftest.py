"""What the tests share: a cache folder of their own, and random numbers whose seed is printed."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import lab


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's cache of this run: empty at first, and nobody else's."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["METAL_LAB_CACHE"] = str(folder)  # processes that tests start inherit it
    return folder


@pytest.fixture
def seed() -> int:
    """A seed, printed so that a failure can be seen again with METAL_LAB_SEED=seed."""
    chosen = int(os.environ.get("METAL_LAB_SEED") or secrets.randbelow(1 << 32))
    print(f"METAL_LAB_SEED={chosen}")
    return chosen


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A generator made from ``seed``."""
    return np.random.default_rng(seed)


@pytest.fixture
def patience() -> Iterator[None]:
    """Makes a test fail that would otherwise hang."""

    def give_up(*_: object) -> None:
        raise TimeoutError("the kernel does not end")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def msl() -> Callable[..., lab.Library]:
    """``lab.compile`` of a source after the usual two lines, so that its own first line is line 3."""

    def compiled(source: str, **options: object) -> lab.Library:
        return lab.compile(f"#include <metal_stdlib>\nusing namespace metal;\n{source}", **options)  # type: ignore[arg-type]

    return compiled
