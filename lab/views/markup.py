"""A trace in HTML: its timeline, what a step changed, how far it is off, the kernel's source.

Strings for panels and reports. Nothing depends on a theme: colours are those of the page, with fallbacks, and
beside each colour stands a sign or a word.
"""

from __future__ import annotations

import functools
import math
from html import escape

import numpy as np
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CppLexer

from ..systems.deviation import Deviation, severity
from ..systems.trace import Step, Trace
from .raster import data_uri, fitted, png

STYLE = """
.ml{font-size:13px;line-height:1.45;color:var(--jp-ui-font-color1,#222);
--ml-dim:var(--jp-ui-font-color2,#616161);--ml-line:var(--jp-border-color1,#bdbdbd);
--ml-now:var(--jp-brand-color1,#1976d2);--ml-bad:#c43e00;--ml-fill:var(--jp-layout-color2,#eee)}
[data-jp-theme-light=false] .ml{--ml-bad:#ff8a50}
.ml .dim{color:var(--ml-dim)}.ml .bad{color:var(--ml-bad);font-weight:600}
.ml table{border-collapse:collapse;margin:2px 0}
.ml td,.ml th{padding:1px 10px 1px 0;text-align:left!important;background:none;border:none;font-weight:normal;
vertical-align:top}.ml th{color:var(--ml-dim)}
.ml code,.ml pre{font-family:var(--jp-code-font-family,monospace);font-size:12px;background:none;margin:0}
.ml-line{display:grid;grid-template-columns:7.5em repeat(var(--n),minmax(0,1fr));gap:2px;margin-bottom:2px;
font-size:11px;line-height:17px}
.ml-line span{overflow:hidden;white-space:nowrap;text-overflow:ellipsis;padding:0 3px;
border:1px solid transparent}
.ml-line .done{background:var(--ml-fill)}.ml-line .ahead{border-color:var(--ml-fill);color:var(--ml-dim)}
.ml-line .now{border-color:var(--ml-now);box-shadow:inset 0 0 0 1px var(--ml-now);font-weight:600}
.ml-line .off{color:var(--ml-bad);border-color:var(--ml-bad);font-weight:600}
.ml-picture{image-rendering:pixelated;border:1px solid var(--ml-line);max-width:100%;display:block}
.ml-source{max-height:420px;overflow:auto;border:1px solid var(--ml-line);padding:4px 8px}
.ml-source pre{white-space:pre;line-height:1.35}
.ml .k,.ml .kt,.ml .kr{color:var(--jp-mirror-editor-keyword-color,#008000);font-weight:600}
.ml .c1,.ml .cm{color:var(--jp-mirror-editor-comment-color,#408080);font-style:italic}
.ml .mi,.ml .mf,.ml .mh{color:var(--jp-mirror-editor-number-color,#080)}
.ml .cp{color:var(--jp-mirror-editor-meta-color,#a2f)}
"""

LINES = 12  # chunks that the timeline shows at a time
EXAMPLES = 4  # changed elements that are told one by one
_UNCHANGED, _CHANGED = (222, 222, 222), (0, 114, 178)


def timeline(trace: Trace, position: int, lines: int = LINES) -> str:
    """The dispatches of the chunks around ``position``, a line for each chunk: those done, the one just run,
    those ahead, and with ``x`` those that deviate from the reference as far as that is known."""
    if not trace.chunks:
        return ""
    current = trace[position - 1].chunk if position else 0
    first = max(0, min(current - lines // 2, len(trace.chunks) - lines))
    shown = range(first, min(first + lines, len(trace.chunks)))
    longest = max(len(trace.chunks[c].plan.dispatches) for c in shown)
    parts = [f"<div class='ml' role='group' aria-label='Timeline of dispatches' style='--n:{longest}'>"]
    for number in shown:
        chunk = trace.chunks[number]
        plan = chunk.plan
        rows = f"{plan.first}" if plan.rows == 1 else f"{plan.first}–{plan.first + plan.rows - 1}"
        parts.append(f"<div class='ml-line'><span class='dim'>{escape(plan.path)} {rows}</span>")
        for offset, dispatch in enumerate(plan.dispatches):
            at = chunk.first_step + offset
            step = trace[at] if at < len(trace) else None
            parts.append(_cell(step, at, position, dispatch.kernel, trace.system))
        parts.append("</div>")
    count = len(trace.chunks)
    if len(shown) < count:
        parts.append(f"<div class='dim'>chunks {first} to {shown[-1]} of {count}</div>")
    return "".join(parts) + "</div>"


def _cell(step: Step | None, at: int, position: int, kernel: str, system: str) -> str:
    off = step is not None and is_off(step)
    classes = ["done" if at < position else "ahead"]
    classes += ["now"] if at == position - 1 else []
    classes += ["off"] if off else []
    told = f"dispatch {at}: {kernel}"
    if step is not None and step.replaced:
        told += ", replaced"
    if off and step is not None:
        told += f"; {_worst(step)}"
    mark = ("✗ " if off else "") + ("✎ " if step is not None and step.replaced else "")
    name = mark + short(kernel, system)
    return f"<span class='{' '.join(classes)}' title='{escape(told, quote=True)}'>{escape(name)}</span>"


def short(kernel: str, system: str) -> str:
    """A kernel's name without what all names of its system begin with."""
    for prefix in (f"{system}c_", f"{system}_"):
        kernel = kernel.removeprefix(prefix)
    return kernel


def is_off(step: Step) -> bool:
    """Whether the step faulted or deviates beyond tolerance, if that has been computed already."""
    if step.fault:
        return True
    return "deviations" in vars(step) and any(d.exceeds for d in step.deviations)


def _worst(step: Step) -> str:
    return str(max((d for d in step.deviations if d.exceeds), key=severity))


def status(trace: Trace, position: int) -> str:
    """One line on the dispatch just run: its number, chunk and kernel, and whether it is right."""
    if not position:
        return f"<div class='ml'>Before the first of {len(trace)} dispatches.</div>"
    step = trace[position - 1]
    plan = step.plan
    rows = f"row {plan.first}" if plan.rows == 1 else f"rows {plan.first} to {plan.first + plan.rows - 1}"
    origin = " <b>✎ from your cell</b>" if step.replaced else ""
    return (
        f"<div class='ml'>Dispatch <b>{step.number}</b> of {len(trace)} · chunk {step.chunk} ({rows}, path "
        f"{escape(plan.path)}) · <code><b>{escape(step.kernel)}</b></code>{origin} · "
        f"{step.seconds * 1e6:.0f} µs · {verdict(step)}</div>"
    )


def verdict(step: Step) -> str:
    """Whether a step is right, in words."""
    if step.fault:
        return f"<span class='bad'>✗ {escape(step.fault)}</span>"
    bad = [d for d in step.deviations if d.exceeds]
    if bad:
        return f"<span class='bad'>✗ deviates: {escape(_element(max(bad, key=severity)))}</span>"
    worst = step.deviation
    if worst is None:
        return "<span class='dim'>not compared: the reference defines none of it</span>"
    return f"✓ as the reference says (off by {worst.relative:.1e} of the largest at most)"


def _element(d: Deviation) -> str:
    of = f"{d.field} of {d.buffer}" if d.field else d.buffer
    return f"{of} at {d.where} is {d.value:.6g}, expected {d.expected:.6g}"


def deviations(step: Step) -> str:
    """A table of the step's deviations, one line for each field it defines."""
    if step.fault:
        return f"<div class='ml bad'>✗ {escape(step.fault)}</div>"
    if not step.deviations:
        return "<div class='ml dim'>The reference defines nothing that this dispatch writes.</div>"
    parts = [
        "<div class='ml'><table><tr><th>buffer</th><th>field</th><th>worst, of the largest</th><th>roundings"
        "</th><th>allowed</th><th>where</th><th>is</th><th>expected</th></tr>"
    ]
    for d in step.deviations:
        sign, css = ("✗", " class='bad'") if d.exceeds else ("✓", "")
        parts.append(
            f"<tr{css}><td>{sign} <code>{escape(d.buffer)}</code></td><td>{escape(d.field)}</td>"
            f"<td>{d.relative:.1e}</td><td>{d.roundings:.3g}</td><td>{d.tolerance:.3g}</td>"
            f"<td>{escape(d.where)}</td><td>{d.value:.7g}</td><td>{d.expected:.7g}</td></tr>"
        )
    return "".join(parts) + "</table></div>"


def changes(step: Step) -> str:
    """What a step wrote: for each buffer how many elements changed, where, and some of them."""
    parts = ["<div class='ml'>"]
    for name in step.written:
        changed = step.changed(name)
        count = int(changed.sum())
        against = "" if name in step.dispatch.writes else " <span class='bad'>✗ not its to write</span>"
        shape = "×".join(map(str, changed.shape))
        parts.append(
            f"<div><code><b>{escape(name)}</b></code> <span class='dim'>{step.plan.buffers[name].dtype} "
            f"{shape}</span>: {count} of {changed.size} elements changed{against}</div>"
        )
        if count:
            parts += [_picture(name, changed), _some(step, name, changed)]
    return "".join(parts) + "</div>"


def _picture(name: str, changed: np.ndarray) -> str:
    flags = fitted(changed.reshape(-1, changed.shape[-1]), 48, 384)
    height, width = flags.shape
    image = data_uri(png(flags.astype(np.uint8), (_UNCHANGED, _CHANGED)))
    scale = max(1, min(384 // max(width, 1), 8))
    told = f"{name}: changed elements, dark; a row is the last axis"
    return (
        f"<img class='ml-picture' src='{image}' alt='{escape(told)}' title='{escape(told)}' "
        f"style='width:{width * scale}px;height:{max(6, height * min(scale, 4))}px'>"
    )


def _some(step: Step, name: str, changed: np.ndarray) -> str:
    before, after = step.value_before(name), step.value(name)
    rows = []
    for flat in np.flatnonzero(changed)[:EXAMPLES].tolist():
        field, where = step.describe(name, flat)
        of = f"{field}, {where}" if field else where
        old, new = (number(values.reshape(-1)[flat].item()) for values in (before, after))
        rows.append(f"<tr><td>{escape(of)}</td><td>{old} → <b>{new}</b></td></tr>")
    more = "" if changed.sum() <= EXAMPLES else "<tr><td class='dim'>…</td><td></td></tr>"
    return f"<table>{''.join(rows)}{more}</table>"


def number(value: float) -> str:
    """A number in few digits; NaN, which fills what nobody has written, as a dash."""
    if isinstance(value, float):
        return "–" if math.isnan(value) else f"{value:.6g}"
    return str(value)


def source(kernel: str, text: str, origin: str, *, replaced: bool = False) -> str:
    """A kernel's source, highlighted, under a line that says where it comes from."""
    mark = "<b>✎ from your cell</b>" if replaced else f"<span class='dim'>{escape(origin)}</span>"
    return (
        f"<div class='ml'><div><code><b>{escape(kernel)}</b></code> {mark}</div>"
        f"<div class='ml-source' tabindex='0' role='region' aria-label='Source of {escape(kernel)}'>"
        f"{_highlighted(text)}</div></div>"
    )


@functools.lru_cache(maxsize=256)
def _highlighted(text: str) -> str:
    return highlight(text, CppLexer(), HtmlFormatter(nowrap=False))
