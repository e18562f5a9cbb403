"""What leaves the ring and goes into the masses, as a drawing: bars, numbers, words."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

pytest.importorskip("plotly")

from lab.o1.readings import Flow
from lab.views.flow import flow_svg

KEPT = "#0072b2"


def flow(**more: Any) -> Flow:
    """Token 12 leaves slot 4 and goes into three landmarks, one of which has its maximum raised by it."""
    told = {
        "head": 2,
        "tokens": np.array([12]),
        "slots": np.array([4]),
        "maxima": np.array([1.0, 2.0, -np.inf]),
        "masses": np.array([3.0, 4.0, 0.0]),
        "rescale": np.array([1.0, 0.5, 0.0]),
        "weights": np.array([[0.25, 1.0, 1.0]]),
        "maxima_after": np.array([1.0, 2.7, 0.5]),
        "after": np.array([3.25, 3.0, 1.0]),
        "committed": False,
    }
    return Flow(**{**told, **more})


def parsed(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def heights(svg: str, fill: str) -> list[float]:
    return [float(e.get("height") or 0) for e in parsed(svg).iter("rect") if e.get("fill") == fill]


def texts(svg: str) -> list[str]:
    return ["".join(e.itertext()) for e in parsed(svg).iter("text")]


def test_bars_are_what_was_there_and_what_is_brought() -> None:
    svg = flow_svg(flow())
    np.testing.assert_allclose(np.array(heights(svg, KEPT)) / 64 * 3.25, [3, 2, 0], atol=0.01)
    np.testing.assert_allclose(
        np.array(heights(svg, "url(#ml-brought)")) / 64 * 3.25, [0.25, 1, 1], atol=0.01
    )
    assert texts(svg)[:6] == ["3.25", "0", "3", "1", "1", "2"]
    assert [e.text for e in parsed(svg).iter("title")] == [
        "landmark 0: mass 3 × 1 (maximum 1 → 1) + 0.25 of token 12 = 3.25",
        "landmark 1: mass 4 × 0.5 (maximum 2 → 2.7) + 1 of token 12 = 3",
        "landmark 2: mass 0 × 0 (maximum -inf → 0.5) + 1 of token 12 = 1",
    ]


def test_it_says_whether_the_state_has_it_already() -> None:
    before, after = flow_svg(flow()), flow_svg(flow(committed=True))
    assert texts(before)[-2] == "masses of the landmarks of head 2, once committed"
    assert texts(after)[-2] == "masses of the landmarks of head 2 after the chunk"
    assert texts(after)[-1] == "■ what they had · ▨ brought by token 12"
    label = parsed(after).get("aria-label")
    assert label == "masses of the landmarks of head 2 after the chunk: 3.25, 3, 1"


def test_before_the_kernels_have_worked_it_out_there_is_what_was_there() -> None:
    unknown = np.full(3, np.nan)
    svg = flow_svg(flow(rescale=unknown, weights=unknown[None], maxima_after=unknown, after=unknown))
    assert heights(svg, KEPT) == [48, 64, 0] and not heights(svg, "url(#ml-brought)")
    assert texts(svg)[-2:] == ["masses of the landmarks of head 2", "■ what they had · token 12 will leave"]


def test_a_chunk_that_evicts_nothing_brings_nothing() -> None:
    none = np.empty(0, int)
    svg = flow_svg(
        flow(tokens=none, slots=none, weights=np.empty((0, 3)), rescale=np.ones(3), after=np.ones(3))
    )
    assert texts(svg)[-1] == "■ what they had · nothing leaves with this chunk"
    assert not heights(svg, "url(#ml-brought)")


def test_several_tokens_are_added_up() -> None:
    svg = flow_svg(flow(tokens=np.array([12, 13]), slots=np.array([4, 5]), weights=np.ones((2, 3))))
    assert "+ 2 of tokens 12 to 13" in svg


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e30, 3e38])
def test_masses_that_broken_kernels_left_are_drawn(value: float) -> None:
    odd = np.array([value, 1.0, value])
    for more in ({"masses": odd}, {"weights": odd[None]}, {"rescale": odd}, {"after": odd}):
        svg = flow_svg(flow(**more))
        assert all(0 <= height <= 64.1 for height in heights(svg, KEPT))


def test_32_landmarks_fit() -> None:
    many = {name: np.ones(32) for name in ("maxima", "masses", "rescale", "maxima_after", "after")}
    svg = flow_svg(flow(**many, weights=np.ones((1, 32))))
    assert len(heights(svg, KEPT)) == 32 and texts(svg)[31] == "31" and len(svg) < 20_000
