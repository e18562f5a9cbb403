"""The stepping panel on the toy system: moving, marks, refusals, replaced kernels, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lab
from lab import systems
from tests.systems import toy

pytest.importorskip("ipywidgets")
pytest.importorskip("anywidget")

import ipywidgets as widgets
import plotly.graph_objects as go

from lab.panels.figures import Shown
from lab.panels.panel import Panel

WRONG = "u.factor * x[u.first + i] + 0.01f"
RIGHT = "u.factor * x[u.first + i]"


class ToySubject:
    """Chunks of four elements; the form asks for the number of chunks."""

    title = "Toy"

    def __init__(self, session: systems.Session) -> None:
        self.session = session
        self.count = widgets.IntText(value=3, description="Chunks")
        self.form, self.focus = widgets.HBox([self.count]), widgets.HBox([])
        self.on_change: Callable[[], None] = lambda: None
        self.on_focus: Callable[[], None] = lambda: None
        self.count.observe(lambda _: self.on_change(), "value")
        self.drawn: list[int] = []

    def begin(self) -> tuple[systems.Trace, Iterator[systems.Step]]:
        if self.count.value < 1:
            raise lab.ArgumentError(f"{self.count.value} chunks were asked for; there is at least <1>.")
        x = np.arange(4 * self.count.value, dtype=np.float32) / 7
        trace = systems.Trace("toy", {"rows": len(x)}, {}, toy.reference)
        return trace, systems.recording(self.session, toy.chunks(x, 4), toy.arrays(x, 4), trace)

    def row_position(self, trace: systems.Trace, row: int) -> int:
        return min(4 * (row // 4 + 1), len(trace))

    def state(self, trace: systems.Trace, position: int) -> str:
        return f"sum {trace.buffers_at(position)['sum'].tolist()}"

    def figures(self, trace: systems.Trace, position: int, dark: bool) -> list[Shown]:
        self.drawn.append(position)
        return [Shown(go.Figure(go.Bar(y=trace.buffers_at(position)["sum"])), f"sums at {position}")]


@pytest.fixture
def toy_system(tmp_path_factory: pytest.TempPathFactory) -> systems.System:
    return toy.system(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def subject(toy_system: systems.System) -> ToySubject:
    return ToySubject(systems.Session(toy_system))


def test_a_panel_opens_before_the_first_dispatch_with_everything_recorded(subject: ToySubject) -> None:
    panel = Panel(subject)
    assert (panel.position, panel.slider.max, panel.row.max) == (0, 12, 11)
    assert "Before the first of 12 dispatches" in panel.status.value
    assert panel.stop.layout.display == panel.progress.layout.display == "none"


def test_a_step_shows_the_dispatch_its_changes_and_its_deviation(subject: ToySubject) -> None:
    panel = Panel(subject)
    panel.step.click()
    assert panel.position == 1
    assert "toy_scale" in panel.status.value and "✓" in panel.status.value
    assert "4 of 4 elements changed" in panel.changes.value
    assert "element 1" in panel.changes.value and "→" in panel.changes.value
    assert "<code>y</code>" in panel.deviations.value
    assert "toy_scale" in panel.source.value and "as shipped" in panel.source.value
    panel.step.click()
    assert "done by the host" in panel.source.value


def test_moves_go_both_ways_and_come_back_to_the_same_state(subject: ToySubject) -> None:
    panel = Panel(subject)
    seen = {}
    for position in range(panel.slider.max + 1):
        panel.position = position
        seen[position] = (panel.state.value, panel.changes.value, panel.timeline.value)
    for position in (7, 3, 0, 12, 5):
        panel.position = position
        assert (panel.state.value, panel.changes.value, panel.timeline.value) == seen[position]
    panel.reset.click()
    panel.chunk_on.click()
    assert panel.position == 4
    panel.step.click()
    panel.chunk_on.click()
    assert panel.position == 8
    panel.back.click()
    panel.chunk_back.click()
    assert panel.position == 4
    panel.chunk_back.click()
    panel.chunk_back.click()
    assert panel.position == 0
    panel.back.click()
    assert panel.position == 0
    panel.position = 99
    assert panel.position == 12


def test_a_chosen_row_is_gone_to(subject: ToySubject) -> None:
    panel = Panel(subject)
    panel.row.value = 6
    assert panel.position == 8


def test_a_replaced_kernel_updates_the_open_panel_and_its_deviation_is_marked(subject: ToySubject) -> None:
    panel = Panel(subject)
    panel.position = 6
    assert panel.find.disabled and panel.first_deviating() is None
    subject.session.replace(toy.SHIPPED.replace(RIGHT, WRONG), names="toy_scale")
    assert panel.position == 6  # where one stood
    assert panel.first_deviating() == 0 and not panel.find.disabled
    assert "✗ ✎ scale" in panel.timeline.value
    panel.find.click()
    assert panel.position == 1
    assert "✗ deviates" in panel.status.value and "element" in panel.status.value
    assert "from your cell" in panel.source.value and "0.01f" in panel.source.value
    subject.session.restore()
    assert panel.first_deviating() is None and "✗" not in panel.timeline.value


def test_a_fault_ends_the_trace_and_is_told(subject: ToySubject) -> None:
    panel = Panel(subject)
    # Around what is written there is nothing; around what is read there may be something.
    subject.session.replace(toy.SHIPPED.replace("y[i] = ", "y[i + 4000000] = "), "toy_scale")
    assert panel.slider.max == 1
    panel.step.click()
    assert "✗" in panel.status.value and "toy_scale" in panel.status.value
    assert "✗ ✎ scale" in panel.timeline.value


def test_an_impossible_form_is_refused_in_place_and_the_panel_works_on(subject: ToySubject) -> None:
    panel = Panel(subject)
    panel.position = 5
    before = panel.status.value
    subject.count.value = 0
    assert "0 chunks were asked for; there is at least &lt;1>." in panel.message.value
    assert (panel.position, panel.status.value, panel.slider.max) == (5, before, 12)
    panel.step.click()
    assert panel.position == 6
    subject.count.value = 2
    assert panel.message.value == "" and panel.slider.max == 8


def test_a_shorter_trace_brings_the_position_back_into_it(subject: ToySubject) -> None:
    panel = Panel(subject)
    panel.position = 12
    subject.count.value = 1
    assert panel.position == 4 and "Dispatch <b>3</b> of 4" in panel.status.value


def test_figures_belong_to_the_position(subject: ToySubject) -> None:
    panel = Panel(subject)
    panel.position = 7
    assert subject.drawn[-1] == 7
    assert [f["label"] for f in panel.figures.figures] == ["sums at 7"]


def test_figures_that_did_not_change_are_not_sent_again(subject: ToySubject) -> None:
    panel = Panel(subject)
    serial = panel.figures.serial
    panel._draw()
    assert panel.figures.serial == serial


def test_in_an_event_loop_recording_goes_on_in_the_background_and_can_be_stopped(subject: ToySubject) -> None:
    subject.count.value = 400

    async def use() -> tuple[Panel, int, int]:
        panel = Panel(subject)
        assert panel._task is not None and panel.stop.layout.display is None
        panel.step.click()  # what is there can be stepped while the rest is recorded
        assert panel.position == 1 and "toy_scale" in panel.status.value
        early = panel.slider.max
        while panel.slider.max == early:
            await asyncio.sleep(0.01)
        panel.stop.click()
        stopped = panel.slider.max
        await asyncio.sleep(0.1)
        return panel, early, stopped

    panel, early, stopped = asyncio.run(use())
    assert early < stopped == panel.slider.max < 1600
    assert "Stopped" in panel.message.value and panel.stop.layout.display == "none"


def test_in_an_event_loop_a_recording_comes_to_its_end(subject: ToySubject) -> None:
    async def use() -> Panel:
        panel = Panel(subject)
        while panel._task is not None:
            await asyncio.sleep(0.01)
        return panel

    panel = asyncio.run(use())
    assert panel.slider.max == 12 and panel.stop.layout.display == "none"


def test_figures_wait_until_the_position_rests(subject: ToySubject) -> None:
    async def use() -> None:
        panel = Panel(subject)
        while panel._task is not None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        subject.drawn.clear()
        for _ in range(8):
            panel.step.click()
        assert not subject.drawn and "Dispatch <b>7</b>" in panel.status.value
        await asyncio.sleep(0.2)

    asyncio.run(use())
    assert subject.drawn == [8]


def test_an_interrupt_while_recording_leaves_what_was_recorded(
    subject: ToySubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subject.session.run_dispatch
    calls: list[Any] = []

    def interrupted(*given: Any, **how: Any) -> Any:
        calls.append(given)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return run(*given, **how)

    monkeypatch.setattr(subject.session, "run_dispatch", interrupted)
    panel = Panel(subject)
    assert "Interrupted" in panel.message.value and panel.slider.max == 5


def test_a_closed_panel_no_longer_follows_its_session(subject: ToySubject) -> None:
    panel = Panel(subject)
    trace = panel.trace
    panel.close()
    subject.session.replace(toy.SHIPPED.replace(RIGHT, WRONG), names="toy_scale")
    assert panel.trace is trace


def test_the_page_asks_for_plotly_and_gets_it_as_a_module(subject: ToySubject) -> None:
    panel = Panel(subject)
    sent: list[Any] = []
    panel.figures.send = lambda content, buffers=None: sent.append((content, buffers))
    panel.figures._answer(None, {"kind": "plotly.js"}, [])
    ((content, (text,)),) = sent
    assert content == {"kind": "plotly.js"}
    assert text.endswith(b"export default globalThis.Plotly;\n") and len(text) > 1_000_000


def test_the_figures_script_comes_with_the_package() -> None:
    import lab.panels.figures

    assert Path(lab.panels.figures.__file__).with_name("figures.js").is_file()
