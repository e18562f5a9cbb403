"""The timeline: every dispatch at its time in the line of its kernel, deviations marked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("plotly")

import lab.o1
from lab.systems import Trace
from lab.views import timeline
from lab.views import timeline as module


def record(session: lab.o1.Session) -> Trace:
    state, q, k, v = lab.o1.example(lab.o1.Sizes(ng=1, hpg=2, d=8, w=4, ns=1, m=2), rows=8)
    return session.trace(state, q, k, v, chunks=2)


@pytest.fixture(scope="module")
def right() -> Trace:
    return record(lab.o1.session())


@pytest.fixture(scope="module")
def broken() -> Trace:
    session = lab.o1.session()
    source = session.source("o1c_far_commit")
    sound = "t_hat[t * d4 + x] * s[rescale_at(u, t)]"
    session.replace(source.replace(sound, "t_hat[t * d4 + x]"), "o1c_far_commit")
    return record(session)


def drawn(figure: Any, name: str) -> Any:
    return next(trace for trace in figure.data if trace.name == name)


def test_each_dispatch_is_as_long_as_it_took_and_begins_where_the_last_one_ended(right: Trace) -> None:
    bars = drawn(timeline(right), "shipped")
    starts, _, ends, gaps = bars.x.reshape(-1, 4).T
    ms = np.array([step.seconds for step in right]) * 1e3
    np.testing.assert_allclose(starts, np.cumsum(ms) - ms)
    np.testing.assert_allclose(ends - starts, np.maximum(ms, ms.sum() / 500))
    assert np.isnan(gaps).all()
    assert bars.customdata[::4, 0].tolist() == [step.number for step in right]


def test_each_kernel_has_a_line_with_its_time_in_the_order_of_the_plan(right: Trace) -> None:
    figure = timeline(right)
    kernels = [d.kernel for d in right[0].plan.dispatches]
    labels = figure.layout.yaxis.ticktext
    assert [label.split()[0] for label in labels] == [name.removeprefix("o1c_") for name in kernels]
    rows = drawn(figure, "shipped").y[::4]
    assert rows.tolist() == [kernels.index(step.kernel) for step in right]
    of_first = sum(step.seconds for step in right if step.kernel == kernels[0])
    shown = f"{of_first * 1e3:.1f} ms" if of_first >= 1e-3 else f"{of_first * 1e6:.0f} µs"
    assert shown in labels[0]


def test_a_trace_that_is_right_has_no_crosses(right: Trace) -> None:
    figure = timeline(right)
    assert not any("deviates" in (trace.name or "") for trace in figure.data)
    assert not figure.layout.annotations and "deviate" not in figure.layout.title.text


def test_deviations_have_a_cross_and_the_first_its_number(broken: Trace) -> None:
    figure = timeline(broken)
    off = [step.number for step in broken if any(d.exceeds for d in step.deviations)]
    crosses = drawn(figure, "✗ deviates")
    assert crosses.customdata[:, 0].tolist() == off
    assert f"dispatch {off[0]}, far_commit" in figure.layout.annotations[0].text
    assert f"{len(off)} deviate" in figure.layout.title.text


def test_replaced_kernels_are_marked(broken: Trace) -> None:
    bars = drawn(timeline(broken), "✎ replaced")
    replaced = [step.number for step in broken if step.replaced]
    assert replaced and bars.customdata[::4, 0].tolist() == replaced
    assert bars.line.color != drawn(timeline(broken), "shipped").line.color


def test_without_compare_only_deviations_that_are_known_are_marked() -> None:
    session = lab.o1.session()
    source = session.source("o1c_far_commit")
    session.replace(source.replace("* s[rescale_at(u, t)]", "* 2.0f"), "o1c_far_commit")
    trace = record(session)
    assert not any("deviates" in (t.name or "") for t in timeline(trace, compare=False).data)
    first = trace.first_deviation()
    assert first is not None
    crosses = drawn(timeline(trace, compare=False), "✗ deviates")
    assert crosses.customdata[:, 0].tolist() == [first.step]


def test_a_fault_has_a_cross() -> None:
    session = lab.o1.session()
    source = session.source("o1c_meta")
    session.replace(
        source.replace("    if (g < u.ng) {", "    meta[1 << 28] = 1;\n    if (g < u.ng) {"), "o1c_meta"
    )
    trace = record(session)
    assert drawn(timeline(trace), "✗ deviates").customdata[:, 0].tolist() == [trace[-1].number]


def test_thin_lines_part_the_chunks(right: Trace) -> None:
    lines = timeline(right).data[0]
    starts = np.cumsum([0.0, *(step.seconds * 1e3 for step in right)])
    np.testing.assert_allclose(lines.x[::3], [starts[c.first_step] for c in right.chunks])


def test_of_a_very_long_trace_the_last_dispatches_are_shown(
    right: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module.__globals__, "DISPATCHES", 5)
    figure = timeline(right)
    assert len(drawn(figure, "shipped").x) == 4 * 5 and "the last 5" in figure.layout.title.text


def test_before_anything_has_run_there_is_a_note() -> None:
    empty = Trace("o1", {}, {})
    assert "Nothing has run" in timeline(empty).layout.annotations[0].text
