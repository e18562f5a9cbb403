"""A radix select in HTML: its passes, which narrow to the threshold digit by digit, and what one counts.

Strings in the style of ``lab.views.markup``: colours go with any theme, beside each stands a word or a sign.
"""

from __future__ import annotations

from html import escape

import numpy as np

from ..qsa.selection import DIGIT_BITS, SHIFTS, Cut, RadixPass, okey, score_of

_TAKEN, _DIGIT, _LOWER = "#0072b2", "#d55e00", "currentColor"
_TOGETHER = "<span style='white-space:nowrap'>"
_WIDTH, _HEIGHT, _BAR = 512, 72, 2  # of the histogram, and of a bin

# The keys of what has an order; beyond them are those of NaN.
_LEAST, _GREATEST = (int(okey(infinity)) for infinity in (-np.inf, np.inf))


def passes(cut: Cut, current: int) -> str:
    """A table of the four passes, each with the digit that it found and the cells that are still wanted then,
    and below it the histogram of pass ``current``, counted from 0."""
    rows = "".join(_row(cut, number, number == current) for number in range(len(cut.passes)))
    heads = (
        "pass",
        "bits",
        "key so far",
        "scores",
        "cells",
        "wanted",
        "digit",
        "cells above",
        "still wanted",
    )
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f"<div class='ml'><table aria-label='Passes of the radix select'><tr>{head}</tr>{rows}</table>"
        f"{histogram(cut.passes[current])}</div>"
    )


def _row(cut: Cut, number: int, current: bool) -> str:
    radix = cut.passes[number]
    known = [f"{cut.passes[n].digit:02X}" for n in range(number)]
    unknown = ["··"] * (len(SHIFTS) - number - 1)
    key = f"{' '.join(known)} <b>{radix.digit:02X}</b> {' '.join(unknown)}"
    cells = (
        f"{'▶ ' if current else ''}{number + 1}",
        f"{_TOGETHER}{radix.shift + DIGIT_BITS - 1}–{radix.shift}</span>",
        f"{_TOGETHER}<code>{key.strip()}</code></span>",
        escape(_scores(radix)),
        str(int(radix.at_or_above[0])),
        str(radix.wanted),
        f"<b>0x{radix.digit:02X}</b>",
        str(radix.cells_above),
        f"<b>{radix.still_wanted}</b>",
    )
    mark = " aria-current='step' style='font-weight:600'" if current else ""
    return f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _scores(radix: RadixPass) -> str:
    """The scores whose keys begin with the prefix and the digit."""
    low = (radix.prefix << DIGIT_BITS | radix.digit) << radix.shift
    ends = low, low + (1 << radix.shift) - 1
    first, last = (score_of(min(max(key, _LEAST), _GREATEST)) for key in ends)
    return f"{first:.7g}" if first == last else f"{first:.7g} to {last:.7g}"


def histogram(radix: RadixPass) -> str:
    """An SVG of the cells that a pass counts by digit, greater ones to the right: of those with a greater
    digit than the one found all are taken, of those that have it some, of the others none."""
    most = max(int(radix.histogram.max()), 1)
    found = radix.digit
    here, below = int(radix.histogram[found]), int(radix.histogram[:found].sum())
    told = (
        f"Cells by digit, bits {radix.shift + DIGIT_BITS - 1} to {radix.shift}: {radix.cells_above} with a "
        f"greater digit than 0x{found:02X}, {here} with this, of which {radix.still_wanted} wanted, {below} "
        "with a lower one"
    )
    bars = []
    for digit in np.flatnonzero(radix.histogram).tolist():
        count = int(radix.histogram[digit])
        height = max(1.5, _HEIGHT * count / most)
        colour = _TAKEN if digit > found else _DIGIT if digit == found else _LOWER
        faint = " fill-opacity='.45'" if digit < found else ""
        bars.append(
            f"<rect x='{_BAR * digit}' y='{_HEIGHT + 12 - height:.1f}' width='{_BAR}' height='{height:.1f}' "
            f"fill='{colour}'{faint}><title>digit 0x{digit:02X}, cells: {count}</title></rect>"
        )
    middle = min(max(_BAR * found + _BAR / 2, 5), _WIDTH - 5)
    base = _HEIGHT + 12
    return (
        f"<svg role='img' aria-label='{escape(told, quote=True)}' viewBox='0 0 {_WIDTH} {base + 14}' "
        f"style='width:100%;max-width:{_WIDTH}px;display:block' font-size='10' fill='currentColor'>"
        f"<text x='{middle}' y='9' text-anchor='middle' fill='{_DIGIT}'>▼</text>{''.join(bars)}"
        f"<path d='M0 {base}.5H{_WIDTH}' stroke='currentColor' stroke-opacity='.5'/>"
        f"<text x='0' y='{base + 11}'>digit 0x00</text>"
        f"<text x='{_WIDTH}' y='{base + 11}' text-anchor='end'>0xFF · highest bar: {most}</text></svg>"
        f"<div><span style='color:{_TAKEN}'>■</span> cells of greater digits, all taken: {radix.cells_above} "
        f"· <span style='color:{_DIGIT}'>▼ ■</span> of digit 0x{found:02X}: {here}, wanted "
        f"{radix.still_wanted} · <span class='dim'>■ of lower digits: {below}</span></div>"
    )
