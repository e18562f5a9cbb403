"""The stepping panel: a trace that is recorded, stepped through both ways and looked at.

What it steps through is a ``Subject``: the o1 or the QSA system with its form, its state and its views.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import ipywidgets as widgets

from ..errors import LabError
from ..systems.session import Session
from ..systems.trace import Step, Trace
from ..views import markup
from .figures import Figures, Shown

_BREATH = 0.04  # seconds of recording after which waiting messages, such as a press of Stop, get their turn
_SETTLE = 0.03  # seconds that the position must rest before figures are drawn for it
_SPEEDS = {"slow": 1500, "1 a second": 1000, "3 a second": 333, "fast": 120}


class Subject(Protocol):
    """What a panel steps through.

    ``form`` holds the controls of shapes and data, ``focus`` those of what the views look at. The panel sets
    ``on_change``, to be called when the trace must be recorded anew, and ``on_focus``.
    """

    title: str
    session: Session
    form: widgets.Widget
    focus: widgets.Widget
    on_change: Callable[[], None]
    on_focus: Callable[[], None]

    def begin(self) -> tuple[Trace, Iterator[Step]]:
        """A trace and the steps that record it. Raises LabError for a form that makes no sense."""

    def row_position(self, trace: Trace, row: int) -> int:
        """The position at which ``row`` has its output, for as much as has been recorded."""

    def state(self, trace: Trace, position: int) -> str:
        """HTML of the state after the first ``position`` dispatches."""

    def figures(self, trace: Trace, position: int, dark: bool) -> list[Shown]:
        """The views of that state."""


class Panel(widgets.VBox):
    """A subject with its controls, timeline, state, changed elements, kernel source and views.

    In a running notebook kernel a trace is recorded in the background, between messages; elsewhere at once.
    ``trace`` and ``position`` are what is shown; setting ``position`` moves there.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.trace: Trace | None = None
        self._task: asyncio.Task[None] | None = None
        self._drawing: asyncio.TimerHandle | None = None
        self._moving = False
        self._build()
        super().__init__(self._layout())
        self.add_class("metal-lab-panel")
        subject.on_change = self.record
        subject.on_focus = self._refresh
        subject.session.watch(self.record)
        self.record()

    # ---- widgets ---------------------------------------------------------------------------------------

    def _build(self) -> None:
        def button(text: str, tip: str, act: Callable[[], None], name: str) -> widgets.Button:
            made = widgets.Button(description=text, tooltip=tip, layout={"width": "auto"})
            made.add_class(f"metal-lab-{name}")
            made.on_click(lambda _: act())
            return made

        self.reset = button("⏮ Reset", "To before the first dispatch", lambda: self.move(0), "reset")
        self.chunk_back = button("⏪ Chunk", "One chunk back", lambda: self.move_chunk(-1), "chunk-back")
        self.back = button("◀ Back", "One dispatch back", lambda: self.move_by(-1), "back")
        self.step = button("Step ▶", "One dispatch on", lambda: self.move_by(1), "step")
        self.chunk_on = button("Chunk ⏩", "One chunk on", lambda: self.move_chunk(1), "chunk-on")
        self.find = button(
            "✗ First deviation", "To the first dispatch that deviates", self._find, "first-deviation"
        )
        self.stop = button("■ Stop", "Stop recording; what is there can be stepped", self._stop, "stop")
        self.slider = widgets.IntSlider(
            description="Dispatch",
            min=0,
            max=0,
            readout=True,
            layout={"flex": "1 1 200px"},
        )
        self.slider.add_class("metal-lab-slider")
        self.play = widgets.Play(min=0, max=0, interval=1000, description="Play")
        widgets.jslink((self.play, "value"), (self.slider, "value"))
        self.speed = widgets.Dropdown(
            options=_SPEEDS, value=1000, description="Speed", layout={"width": "160px"}
        )
        widgets.link((self.speed, "value"), (self.play, "interval"))
        self.row = widgets.BoundedIntText(
            description="To row", min=0, max=0, layout={"width": "150px"}, tooltip="To where this row is done"
        )
        self.row.add_class("metal-lab-row")
        self.progress = widgets.IntProgress(description="Recording", min=0, max=1, layout={"width": "260px"})
        self.message = widgets.HTML()
        self.message.add_class("metal-lab-message")
        self.status, self.timeline = widgets.HTML(), widgets.HTML()
        self.status.add_class("metal-lab-status")
        self.timeline.add_class("metal-lab-timeline")
        self.state, self.changes, self.deviations = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self.state.add_class("metal-lab-state")
        self.source = widgets.HTML()
        self.source.add_class("metal-lab-source")
        self.figures = Figures()
        self.slider.observe(self._moved, "value")
        self.row.observe(self._to_row, "value")
        self.figures.observe(lambda _: self._draw(), "dark")

    def _layout(self) -> list[widgets.Widget]:
        row = widgets.Layout(flex_flow="row wrap", align_items="center")
        moves = [self.reset, self.chunk_back, self.back, self.step, self.chunk_on, self.find]
        column = {"flex": "1 1 380px", "min_width": "0"}
        beside = widgets.Layout(flex_flow="row wrap", align_items="flex-start")
        return [
            widgets.HTML(f"<style>{markup.STYLE}</style><div class='ml'><b>{self.subject.title}</b></div>"),
            self.subject.form,
            self.message,
            widgets.Box([*moves, self.progress, self.stop], layout=row),
            widgets.Box([self.slider, self.play, self.speed, self.row], layout=row),
            self.status,
            self.timeline,
            self.deviations,
            widgets.Box(
                [
                    widgets.VBox([self.state, self.changes], layout=column),
                    widgets.VBox([self.source], layout=column),
                ],
                layout=beside,
            ),
            self.subject.focus,
            self.figures,
        ]

    # ---- recording -------------------------------------------------------------------------------------

    def record(self) -> None:
        """Record the trace anew from the form and the session's kernels; an impossible form is refused in
        place, and what was shown stays."""
        try:
            trace, steps = self.subject.begin()
        except LabError as problem:
            self._say(str(problem))
            return
        self._cancel()
        self._say("")
        self.trace = trace
        self.play.playing = False
        total = _Total(trace)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._work(iter(steps), total, float("inf"))
            self._ended()
            return
        self._show_recording(True)
        # The first breath is taken at once, so that the panel does not open empty.
        if self._work(steps, total, _BREATH):
            self._task = loop.create_task(self._continue(steps, total))
        else:
            self._ended()

    async def _continue(self, steps: Iterator[Step], total: _Total) -> None:
        try:
            while True:
                await asyncio.sleep(0.001)
                if not self._work(steps, total, _BREATH):
                    break
        except asyncio.CancelledError:
            return
        self._ended()

    def _work(self, steps: Iterator[Step], total: _Total, seconds: float) -> bool:
        """Record for about ``seconds``; whether there is more to do."""
        until = time.monotonic() + seconds
        more = True
        try:
            for step in steps:
                step.deviations  # noqa: B018  computed here, so that they show in the timeline
                if time.monotonic() > until:
                    break
            else:
                more = False
        except LabError as problem:
            self._say(str(problem))
            more = False
        except KeyboardInterrupt:
            self._say("Interrupted. What had been recorded can be stepped through.")
            more = False
        self._recorded(total)
        return more

    def _recorded(self, total: _Total) -> None:
        assert self.trace is not None
        count = len(self.trace)
        first = self.slider.max == 0
        self.progress.max, self.progress.value = max(total(), 1), count
        self._moving = True  # a slider that gets shorter moves, which is not the user's doing
        self.slider.max = self.play.max = count
        self._moving = False
        rows = sum(chunk.plan.rows for chunk in self.trace.chunks)
        self.row.max = max(0, rows - 1)
        if first and count and self.slider.value == 0:
            self._show()

    def _ended(self) -> None:
        self._task = None
        self._show_recording(False)
        self._show()

    def _show_recording(self, running: bool) -> None:
        for widget in (self.progress, self.stop):
            widget.layout.display = None if running else "none"

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def _stop(self) -> None:
        if self._task is not None:
            self._cancel()
            self._say("Stopped. What has been recorded can be stepped through.")
            self._ended()

    def close(self) -> None:
        """Take the panel off the page and off its session."""
        self._cancel()
        self.subject.session.unwatch(self.record)
        super().close()

    # ---- moving ----------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """How many dispatches have been run where the panel stands."""
        return int(self.slider.value)

    @position.setter
    def position(self, position: int) -> None:
        self.move(position)

    def move(self, position: int) -> None:
        """Go to after the first ``position`` dispatches, or as near as the trace has them."""
        self.slider.value = max(0, min(position, self.slider.max))

    def move_by(self, dispatches: int) -> None:
        """Go this many dispatches on, or back."""
        self.move(self.position + dispatches)

    def move_chunk(self, direction: int) -> None:
        """Go to the next end of a chunk, or to the one before."""
        if self.trace is None or not self.trace.chunks:
            return
        ends = [0, *(c.first_step + len(c.plan.dispatches) for c in self.trace.chunks)]
        beyond = [e for e in ends if (e - self.position) * direction > 0]
        self.move(min(beyond, default=self.slider.max) if direction > 0 else max(beyond, default=0))

    def _to_row(self, change: Any) -> None:
        if self.trace is not None and len(self.trace):
            self.move(self.subject.row_position(self.trace, change["new"]))

    def _find(self) -> None:
        number = self.first_deviating()
        if number is None:
            self._say("No dispatch deviates from the reference in what has been recorded.")
        else:
            self.move(number + 1)

    def first_deviating(self) -> int | None:
        """The number of the first dispatch recorded that faulted or deviates beyond tolerance."""
        return next((s.number for s in self.trace or () if markup.is_off(s)), None)

    def _moved(self, _: Any) -> None:
        if not self._moving:
            self._show()

    # ---- showing ---------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        self.message.value = f"<div class='ml bad' role='alert'>{_escaped(text)}</div>" if text else ""

    def _refresh(self) -> None:
        if self.trace is not None:
            self.state.value = self.subject.state(self.trace, self.position)
            self._draw()

    def _show(self) -> None:
        """State, timeline and changes at once; the figures when the position has come to rest."""
        if self.trace is None:
            return
        trace, position = self.trace, min(self.position, len(self.trace))
        step = trace[position - 1] if position else None
        self.status.value = markup.status(trace, position)
        self.timeline.value = markup.timeline(trace, position)
        self.state.value = self.subject.state(trace, position)
        self.changes.value = markup.changes(step) if step else ""
        self.deviations.value = markup.deviations(step) if step else ""
        self.source.value = self._source_of(step or (trace[0] if len(trace) else None))
        self.find.disabled = self.first_deviating() is None
        self._draw_soon()

    def _source_of(self, step: Step | None) -> str:
        if step is None:
            return ""
        if step.dispatch.host:
            return markup.source(step.kernel, "", "done by the host: a matrix product")
        kernel = self.subject.session.kernel(step.kernel, step.plan.defines)
        return markup.source(step.kernel, kernel.source, "as shipped", replaced=step.replaced)

    def _draw_soon(self) -> None:
        """Figures cost more than the rest: while the position still moves they wait."""
        if self._drawing is not None:
            self._drawing.cancel()
            self._drawing = None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._draw()
            return
        self._drawing = loop.call_later(_SETTLE, self._draw)

    def _draw(self) -> None:
        if self.trace is not None:
            position = min(self.position, len(self.trace))
            self.figures.show(self.subject.figures(self.trace, position, self.figures.dark))


class _Total:
    """How many dispatches a trace will have, guessed from the rows that have been recorded."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.rows = int(trace.about.get("rows", 0))

    def __call__(self) -> int:
        done = sum(chunk.plan.rows for chunk in self.trace.chunks)
        return round(len(self.trace) * self.rows / done) if done else 1


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("\n", "<br>")
