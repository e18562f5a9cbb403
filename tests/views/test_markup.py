"""Traces in HTML: well-formed, escaped, and saying in words what colours say."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from lab import systems
from lab.views import markup
from tests.systems import toy

VOID = {"img", "br"}


class Checker(HTMLParser):
    """Fails where an element is closed that is not the one last opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def words(html: str) -> str:
    """The text of well-formed ``html``."""
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.open
    return checker.text


def traced(session: systems.Session, chunks: int = 3) -> systems.Trace:
    x = np.arange(4 * chunks, dtype=np.float32) / 7
    trace = systems.Trace("toy", {}, {}, toy.reference)
    systems.record(session, toy.chunks(x, 4), toy.arrays(x, 4), trace)
    assert trace.deviations is not None
    return trace


@pytest.fixture
def session(tmp_path: Path) -> systems.Session:
    return systems.Session(toy.system(tmp_path))


def test_every_piece_is_well_formed_at_every_position(session: systems.Session) -> None:
    session.replace(toy.SHIPPED.replace("sum[i] += z[i]", "sum[i] -= z[i]"), names="toy_add")
    trace = traced(session)
    for position in range(len(trace) + 1):
        words(markup.timeline(trace, position))
        words(markup.status(trace, position))
    for step in trace:
        words(markup.changes(step))
        words(markup.deviations(step))
    words(markup.source("toy_scale", toy.SHIPPED, "as shipped"))


def test_the_timeline_shows_the_chunks_around_the_position(session: systems.Session) -> None:
    trace = traced(session, 40)
    for position, first, last in ((0, 0, 11), (80, 13, 24), (160, 28, 39)):
        assert f"chunks {first} to {last} of 40" in words(markup.timeline(trace, position))
    assert "chunks" not in words(markup.timeline(traced(session, 3), 2))


def test_deviations_are_marked_by_a_sign_and_told_in_words(session: systems.Session) -> None:
    session.replace(toy.SHIPPED.replace("sum[i] += z[i]", "sum[i] -= z[i]"), names="toy_add")
    trace = traced(session)
    line = words(markup.timeline(trace, 1))
    assert line.count("✗ ✎ add") == 3 and "✗ scale" not in line
    assert "✗ deviates: sum at element 2" in words(markup.status(trace, 3))
    assert "✓" in words(markup.status(trace, 1))
    assert "from your cell" in words(markup.status(trace, 3))
    assert "✗ sum" in words(markup.deviations(trace[2])) and "✓ count" in words(markup.deviations(trace[2]))


def test_what_is_not_known_to_deviate_is_not_computed_for_the_timeline(session: systems.Session) -> None:
    x = np.arange(4, dtype=np.float32)
    trace = systems.Trace("toy", {}, {}, lambda *_: pytest.fail("nobody asked for a deviation"))
    systems.record(session, toy.chunks(x, 4), toy.arrays(x, 4), trace)
    assert "✗" not in markup.timeline(trace, 2)


def test_changes_count_and_name_elements(session: systems.Session) -> None:
    trace = traced(session)
    told = words(markup.changes(trace[2]))
    assert "sum float32 4: 3 of 4 elements changed" in told  # the first element of x is 0
    assert "count uint32 1: 1 of 1 elements changed" in told and "0 → 4" in told
    assert "– → " in words(markup.changes(trace[0]))  # nobody had written y


def test_a_write_against_the_contract_is_pointed_out(session: systems.Session) -> None:
    source = toy.SHIPPED.replace("device const float* z [[buffer(0)]]", "device float* z [[buffer(0)]]")
    session.replace(source.replace("sum[i] += z[i];", "sum[i] += z[i]; z[i] = 5;"), names="toy_add")
    assert "not its to write" in words(markup.changes(traced(session)[2]))


def test_source_is_escaped(session: systems.Session) -> None:
    assert "x < 1 && y" in words(markup.source("f", "kernel void f() { x < 1 && y; }", "as shipped"))
