"""What the subjects of panels share: labelled controls, and which of their changes are the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ipywidgets as widgets

from .. import systems
from ..systems import Trace
from ..views import deviation
from .figures import Shown

WRAP = widgets.Layout(flex_flow="row wrap", align_items="center", grid_gap="0 10px")
DESCRIBED = {"description_width": "initial"}  # else long names are cut off


class Form:
    """The controls that a subject's ``form`` and ``focus`` are made of: see ``lab.panels.panel.Subject``.

    ``number`` is that of the row or token that is looked at, ``follow`` whether this stays in the chunk of
    the dispatch just run.
    """

    number: widgets.BoundedIntText
    follow: widgets.Checkbox

    def __init__(self, session: systems.Session) -> None:
        self.session = session
        self.on_change: Callable[[], None] = _nothing
        self.on_focus: Callable[[], None] = _nothing
        self._quiet = False
        self._rows = range(0)

    def _adapt(self) -> None:
        """Have the controls agree with each other."""
        raise NotImplementedError

    def _changed(self, _: Any) -> None:
        if not self._quiet:
            self._adapt()
            self.on_change()

    def _chosen(self, _: Any) -> None:
        if not self._quiet:
            self.on_focus()

    def _number_chosen(self, change: Mapping[str, Any]) -> None:
        if not self._quiet:
            with self._silently():  # one of another chunk is to be seen
                self.follow.value &= change["new"] in self._rows
            self.on_focus()

    @contextmanager
    def _silently(self) -> Iterator[None]:
        """Changes made inside are not the user's."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def _bound(self, number: widgets.BoundedIntText, count: int) -> None:
        """Let ``number`` go over ``count`` things."""
        last = max(count - 1, 0)
        with self._silently():
            value, number.max = min(number.value, last), max(number.max, last)
            number.value, number.max = value, last

    def _looked_at(self, trace: Trace, position: int) -> int:
        """The row or token that is looked at: one of the chunk of the dispatch just run, if it follows."""
        self._rows = range(int(trace.about["rows"]))
        if self.follow.value and position:
            plan = trace[position - 1].plan
            self._rows = range(plan.first, plan.first + plan.rows)
            if self.number.value not in self._rows:
                with self._silently():
                    self.number.value = self._rows[-1]
        return int(self.number.value)


def choice(name: str, options: Sequence[Any], width: int, value: Any = None) -> widgets.Dropdown:
    """One of ``options``, by default the first, in ``width`` pixels."""
    layout = {"width": f"{width}px"}
    made = widgets.Dropdown(options=options, description=name, layout=layout, style=DESCRIBED)
    if value is not None:
        made.value = value
    return made


def whole(name: str, value: int, tip: str) -> widgets.IntText:
    """A whole number of any size: what does not fit is refused in words."""
    return widgets.IntText(value, description=name, tooltip=tip, layout=_sized(name), style=DESCRIBED)


def bounded(name: str, tip: str) -> widgets.BoundedIntText:
    """A whole number from 0, whose bound is set when it is known."""
    return widgets.BoundedIntText(
        0, min=0, max=0, description=name, tooltip=tip, layout=_sized(name), style=DESCRIBED
    )


def following(what: str) -> widgets.Checkbox:
    """Whether the focus follows ``what``."""
    return widgets.Checkbox(True, description=f"follow the {what}", indent=False, layout={"width": "auto"})


def rows_of(lines: Sequence[Sequence[widgets.Widget]]) -> widgets.Widget:
    """The form: controls in lines that wrap."""
    made = widgets.VBox([widgets.Box(line, layout=WRAP) for line in lines])
    made.add_class("metal-lab-form")
    return made


def focus_of(controls: Sequence[widgets.Widget]) -> widgets.Widget:
    """The focus: controls in a line that wraps."""
    made = widgets.Box(controls, layout=WRAP)
    made.add_class("metal-lab-focus")
    return made


def error_of(trace: Trace, position: int, name: str, dark: bool) -> list[Shown]:
    """The error of a buffer as the last dispatch that wrote it left it; nothing where none has."""
    step = next((s for s in reversed(trace[:position]) if name in s.dispatch.writes), None)
    if step is None:
        return []
    told = f"Error of {name} after dispatch {step.number}, {step.kernel}."
    return [Shown(deviation.of_step(step, name, dark=dark), told)]


def _nothing() -> None: ...


def _sized(name: str) -> dict[str, str]:
    """Room for the name and a number of five digits."""
    return {"width": f"{70 + 8 * len(name)}px"}
