"""Tests of what holds for all examples that hypothesis draws: of a few by default, of many among the slow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

SETTINGS = settings(
    derandomize=False,
    print_blob=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[phase for phase in Phase if phase is not Phase.explain],
)


def for_all(
    few: int, many: int, strategies: Callable[[bool], Mapping[str, Any]] | None = None, **drawn: Any
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """Makes a test of ``few`` examples, and a slow one of ``many``, of a function of what is ``drawn``.

    ``strategies`` gives more to draw by name, for the many (True) or for the few.
    """

    def decorate(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])
        def test(examples: int) -> None:
            more = strategies(examples == many) if strategies else {}
            settings(SETTINGS, max_examples=examples)(given(**drawn, **more)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        return test

    return decorate
