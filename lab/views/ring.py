"""The ring of a group as a drawing: SVG strings in the colours of the page, whatever its theme.

Age is told by colour, dark for the oldest and bright for the newest. What else there is to see has a shape
and a word of its own, and every cell says what it holds when the pointer rests on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from ..o1.readings import Ring
from .style import sequence

__all__ = ["ring_svg"]

LARGE = 16  # slots up to which each cell has its text
ACROSS, MOST = 32, 512  # cells beside each other in larger rings, and altogether
_COLOURS = [colour for _, colour in sequence()]
_ON_DARK = 5  # colours on which text is white
_WIDE, _HIGH, _TOP = 60, 40, 28  # of a cell with text
_SMALL = 16  # of one without

# The page's own colours; where it has none, those of JupyterLab's light theme.
_INK, _BAD = "var(--jp-ui-font-color1,#222)", "var(--ml-bad,#c43e00)"
_NOW = "var(--jp-brand-color1,#1976d2)"


def ring_svg(ring: Ring, *, logical: bool = False) -> str:
    """The ring as it lies in memory, a cell for each slot, or, ``logical``, its tokens from the oldest on.

    Marked are the head (the oldest token's slot), the slot that the next token goes into, the slots that the
    chunk has written, and the tokens that it evicts: those that still lie there, and where those lay that
    have left. Empty slots are dashed, slots beyond the group's window dotted. Rings of up to 16 slots are
    drawn large, with numbers and ages; in one of more than 512 a cell stands for several slots, and says so.
    """
    slots = ring.logical if logical else np.arange(ring.slots)
    marks = _Marks(ring)
    if len(slots) <= LARGE and ring.slots <= LARGE:
        return _large(ring, slots, marks, logical)
    return _compact(ring, slots, marks, logical)


class _Marks:
    """What is marked, by slot."""

    def __init__(self, ring: Ring) -> None:
        self.head = ring.head if ring.length > 0 and ring.head < ring.slots else -1
        self.next = ring.next_slot
        self.written = set(ring.written.tolist())
        self.left = dict(zip(ring.evicted_slots.tolist(), ring.evicted.tolist(), strict=True))
        leaving = set(ring.leaving.tolist())
        self.leaving = {slot for slot, t in enumerate(ring.tokens.tolist()) if t in leaving}
        ahead = ring.entering.tolist()
        self.entering = {(self.next + j) % ring.window: t for j, t in enumerate(ahead)}
        self.newest = max(int(ring.ages.max(initial=0)), 1)

    def colour(self, age: int) -> int:
        """The number of the colour of an age: the brighter the newer."""
        return round((len(_COLOURS) - 1) * (1 - age / self.newest))


def _told(ring: Ring, slot: int, token: int, age: int, marks: _Marks) -> str:
    """What a slot holds and what happens to it, in words."""
    if slot >= ring.window:
        return f"slot {slot}: beyond the group's window"
    told = f"slot {slot}: " + _content(ring, slot, token, age)
    for is_so, what in (
        (slot == marks.head, "the head"),
        (slot == marks.next, "the next token goes here"),
        (slot in marks.written, "just written"),
        (slot in marks.leaving, "leaves with this chunk"),
    ):
        told += f"; {what}" if is_so else ""
    if slot in marks.left:
        told += f"; token {marks.left[slot]} has just left"
    if slot in marks.entering:
        told += f"; token {marks.entering[slot]} enters here"
    return told


def _content(ring: Ring, slot: int, token: int, age: int) -> str:
    if token == -1:
        return "empty"
    if token < 0:
        return "the key of no known token"
    text = ring.texts[slot] if ring.texts else ""
    return f"token {token}" + (f" ‘{text}’" if text else "") + f", age {age}"


def _begin(ring: Ring, width: int, height: int, logical: bool, more: str) -> str:
    order = "in logical order, oldest first" if logical else "in memory"
    told = (
        f"Ring of group {ring.group} {order}: {ring.length} of {ring.window} slots filled, head in slot "
        f"{ring.head}, next slot {ring.next_slot}"
    )
    for tokens, what in (
        (ring.leaving, "leaving"),
        (ring.entering, "entering"),
        (ring.evicted, "just evicted"),
    ):
        told += f", {what}: {_numbers(tokens)}" if tokens.size else ""
    told += f", just written: slots {_numbers(ring.written)}" if ring.written.size else ""
    return (
        f"<svg role='img' aria-label='{escape(told + more, quote=True)}' viewBox='0 0 {width} {height}' "
        f"style='width:100%;max-width:{width}px;display:block;color:{_INK}' font-size='10' "
        "fill='currentColor' font-family='system-ui,sans-serif'>"
    )


def _numbers(values: np.ndarray) -> str:
    """Some numbers in words; neighbours as a range."""
    found = values.tolist()
    if len(found) > 2 and found == list(range(found[0], found[0] + len(found))):
        return f"{found[0]} to {found[-1]}"
    return ", ".join(map(str, found[:8])) + (" …" if len(found) > 8 else "")


# ---- up to 16 slots ------------------------------------------------------------------------------------


def _large(ring: Ring, slots: np.ndarray, marks: _Marks, logical: bool) -> str:
    height = _TOP + _HIGH + (12 if ring.texts else 0)
    ages = ring.ages
    held = (f"slot {slot} {_content(ring, slot, int(ring.tokens[slot]), int(ages[slot]))}" for slot in slots)
    parts = [_begin(ring, _WIDE * ring.slots + 4, height + 38, logical, f"; {'; '.join(held)}")]
    for place, slot in enumerate(slots.tolist()):
        token, age = int(ring.tokens[slot]), int(ages[slot])
        told = escape(_told(ring, slot, token, age, marks))
        parts.append(f"<g transform='translate({place * _WIDE + 3} 0)'><title>{told}</title>")
        parts += _cell(ring, slot, token, age, marks, height - _TOP)
        parts += _words(slot, marks, height)
        parts.append("</g>")
    if not len(slots):
        parts.append(f"<text x='4' y='{_TOP + 14}'>empty</text>")
    return "".join(parts) + "</svg>"


def _cell(ring: Ring, slot: int, token: int, age: int, marks: _Marks, high: int) -> Iterator[str]:
    middle = (_WIDE - 6) // 2
    box = f"<rect y='{_TOP}' width='{_WIDE - 6}' height='{high}' rx='3' "
    border = "stroke='currentColor'"
    if slot in marks.written:
        border = f"style='stroke:{_NOW}' stroke-width='3'"
    elif slot in marks.leaving:
        border = f"style='stroke:{_BAD}' stroke-width='3' stroke-dasharray='6 3'"
    if slot >= ring.window:
        yield f"{box}fill='none' stroke='currentColor' stroke-opacity='.4' stroke-dasharray='1 4'/>"
        yield f"<text x='{middle}' y='{_TOP + 22}' text-anchor='middle' fill-opacity='.6'>unused</text>"
        return
    if token < 0:
        yield f"{box}fill='none' stroke-dasharray='4 3' {border}/>"
        yield (
            f"<text x='{middle}' y='{_TOP + 23}' text-anchor='middle' fill-opacity='.75'>"
            f"{'empty' if token == -1 else '? key'}</text>"
        )
        return
    number = marks.colour(age)
    yield f"{box}fill='{_COLOURS[number]}' {border}/>"
    lines = [(f"{token}", 15, 14, " font-weight='600'"), (f"age {age}", 31, 10, "")]
    if ring.texts:
        text = ring.texts[slot]
        lines.append((text if len(text) <= 8 else f"{text[:7]}…", 45, 10, ""))
    ink = "#fff" if number < _ON_DARK else "#000"
    yield f"<g fill='{ink}' text-anchor='middle'>"
    for text, y, size, more in lines:
        yield f"<text x='{middle}' y='{_TOP + y}' font-size='{size}'{more}>{escape(text)}</text>"
    yield "</g>"


def _words(slot: int, marks: _Marks, bottom: int) -> Iterator[str]:
    """What stands above and below a cell."""
    middle = (_WIDE - 6) // 2
    yield f"<text x='{middle}' y='10' text-anchor='middle' fill-opacity='.75'>slot {slot}</text>"
    if slot in marks.entering:
        entering = f"▼ {marks.entering[slot]} enters"
        yield f"<text x='{middle}' y='23' text-anchor='middle' font-size='9'>{entering}</text>"
    elif slot == marks.next:
        yield f"<text x='{middle}' y='23' text-anchor='middle'>▼ next</text>"
    below = ["▲ head"] if slot == marks.head else []
    if slot in marks.leaving:
        below.append(f"<tspan style='fill:{_BAD}'>✕ leaves</tspan>")
    if slot in marks.written:
        below.append(f"<tspan style='fill:{_NOW}' font-weight='600'>● new</tspan>")
    if slot in marks.left:
        below.append(f"<tspan style='fill:{_BAD}'>✕ {marks.left[slot]} left</tspan>")
    for line, text in enumerate(below):
        yield f"<text x='{middle}' y='{bottom + 11 + 12 * line}' text-anchor='middle'>{text}</text>"


# ---- more ----------------------------------------------------------------------------------------------


def _compact(ring: Ring, slots: np.ndarray, marks: _Marks, logical: bool) -> str:
    each = max(1, -(-len(slots) // MOST))
    cells = [slots[start : start + each].tolist() for start in range(0, len(slots), each)]
    rows = max(1, -(-len(cells) // ACROSS))
    left, bottom = 34, rows * _SMALL
    said = f", a cell stands for {each} slots" if each > 1 else ""
    parts = [_begin(ring, left + ACROSS * _SMALL + 2, bottom + 32, logical, said)]
    ages, tokens = ring.ages.tolist(), ring.tokens.tolist()
    colour: str | None = None
    signs: list[str] = []
    for number, cell in enumerate(cells):
        x, y = left + number % ACROSS * _SMALL, number // ACROSS * _SMALL
        if not number % ACROSS:
            parts.append("</g>" if colour is not None else "")
            colour = None
            name = number * each if logical else cell[0]
            parts.append(f"<text x='{left - 4}' y='{y + 11}' text-anchor='end'>{name}</text>")
        newest = max(cell, key=tokens.__getitem__)
        fill = _fill(ring, newest, tokens[newest], ages[newest], marks)
        if fill != colour:
            parts.append(("</g>" if colour is not None else "") + f"<g {fill}>")
            colour = fill
        told = _told(ring, newest, tokens[newest], ages[newest], marks)
        if each > 1:
            told = f"slots {cell[0]} to {cell[-1]}, in the newest of them, {told}"
        inside = _SMALL - 2
        parts.append(
            f"<rect x='{x}' y='{y}' width='{inside}' height='{inside}'><title>{escape(told)}</title></rect>"
        )
        signs += _signs(cell, x, y, marks)
    parts.append("</g>" if colour is not None else "")
    # Clicks and hovering are the cells' own.
    parts.append(f"<g fill='none' pointer-events='none'>{''.join(signs)}</g>")
    parts += _key(ring, bottom, each, logical)
    return "".join(parts) + "</svg>"


def _fill(ring: Ring, slot: int, token: int, age: int, marks: _Marks) -> str:
    hollow = "fill='none' stroke='currentColor' pointer-events='all' stroke-dasharray="
    if slot >= ring.window:
        return f"{hollow}'1 3' stroke-opacity='.4'"
    if token < 0:
        return hollow + ("'3 2'" if token == -1 else "'6 1'")
    return f"fill='{_COLOURS[marks.colour(age)]}'"


def _signs(cell: list[int], x: int, y: int, marks: _Marks) -> Iterator[str]:
    """The marks of a cell, each with a light edge so that it shows on any colour."""
    if any(slot in marks.written for slot in cell):
        yield (
            f"<rect x='{x + 0.5}' y='{y + 0.5}' width='{_SMALL - 3}' height='{_SMALL - 3}' "
            f"style='stroke:{_NOW}' stroke-width='2'/>"
        )
    if marks.head in cell:
        yield _outlined(f"M{x} {y}h8l-8 8z", filled=True)
    if marks.next in cell:
        yield _outlined(f"M{x + 4} {y + 7}a3 3 0 1 0 6 0a3 3 0 1 0 -6 0")
    if any(slot in marks.leaving for slot in cell):
        yield _outlined(f"M{x + 2} {y + 2}l10 10")
    if any(slot in marks.left for slot in cell):
        yield _outlined(f"M{x + 8} {y + 8}l5 5m0 -5l-5 5")


def _outlined(path: str, *, filled: bool = False) -> str:
    dark = "fill='#000'" if filled else "stroke-width='1.3'"
    return f"<path d='{path}' stroke='#fff' stroke-width='3'/><path d='{path}' stroke='#000' {dark}/>"


def _key(ring: Ring, bottom: int, each: int, logical: bool) -> Iterator[str]:
    """Two lines that say what is what."""
    steps = "".join(
        f"<rect x='{34 + 9 * n}' y='{bottom + 4}' width='9' height='8' fill='{colour}'/>"
        for n, colour in enumerate(_COLOURS)
    )
    cells = f" · a cell: {each} slots" if each > 1 else ""
    order = "logical order, oldest first" if logical else "slots in memory"
    yield f"{steps}<text x='130' y='{bottom + 12}'>oldest to newest · {order}{cells}</text>"
    signs = [f"◤ head: {ring.head}", f"○ next: {ring.next_slot}"]
    if ring.written.size:
        signs.append(f"▣ written: {_numbers(ring.written)}")
    if ring.leaving.size:
        signs.append(f"╲ leaving: tokens {_numbers(ring.leaving)}")
    if ring.evicted.size:
        signs.append(f"✕ left: tokens {_numbers(ring.evicted)}")
    yield f"<text x='34' y='{bottom + 26}'>{' · '.join(signs)}</text>"
