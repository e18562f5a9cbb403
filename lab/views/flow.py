"""What leaves the ring goes into the landmarks' masses: an SVG in the colours of the page."""

from __future__ import annotations

from html import escape

import numpy as np

from ..o1.readings import Flow

__all__ = ["flow_svg"]

_KEPT, _NEW = "#0072b2", "#d55e00"
_TOP, _HIGH = 14, 64  # of the bars
_LEAST = 8  # bars that there is room for, and for what is written below them
_INK = "var(--jp-ui-font-color1,#222)"


@np.errstate(all="ignore")  # broken kernels leave numbers that are none
def flow_svg(flow: Flow) -> str:
    """The mass of each landmark of a query head, a bar each: below, what it had, above it, hatched, what the
    tokens bring that leave with the chunk. The number is the mass after the chunk.

    Masses are relative to their maxima: where a maximum rises, what a landmark had shrinks. Before the
    kernels have worked out what the chunk brings, the bars are what the landmarks have.
    """
    known = not np.isnan(flow.after).any()
    kept = flow.masses * flow.rescale if known else flow.masses
    brought = flow.weights.sum(0) if known and flow.tokens.size else np.zeros(len(kept))
    total = flow.after if known else flow.masses
    heights = np.nan_to_num(np.stack([kept, brought]), posinf=0.0, neginf=0.0).clip(0)
    heights *= _HIGH / (float(heights.sum(0).max(initial=0)) or 1.0)
    wide = 40 if len(kept) <= 16 else 24
    width, base = wide * max(len(kept), _LEAST) + 8, _TOP + _HIGH
    when = "" if not known else " after the chunk" if flow.committed else ", once committed"
    title = f"masses of the landmarks of head {flow.head}{when}"
    told = f"{title}: {', '.join(f'{x:.3g}' for x in total)}"
    parts = [
        f"<svg role='img' aria-label='{escape(told, quote=True)}' viewBox='0 0 {width} {base + 44}' "
        f"style='width:100%;max-width:{width}px;display:block;color:{_INK}' font-size='10' "
        "fill='currentColor' font-family='system-ui,sans-serif'><defs><pattern id='ml-brought' width='4' "
        "height='4' patternUnits='userSpaceOnUse' patternTransform='rotate(45)'><rect width='4' height='4' "
        f"fill='{_NEW}' fill-opacity='.45'/><rect width='2' height='4' fill='{_NEW}'/></pattern></defs>"
    ]
    for b, (had, came) in enumerate(heights.T.tolist()):
        x = 4 + b * wide
        bar, middle = f"x='{x + 3}' width='{wide - 6}'", f"x='{x + wide // 2}' text-anchor='middle'"
        parts.append(
            f"<g><title>{_sum(flow, b, known)}</title>"
            f"<rect {bar} y='{_TOP}' height='{_HIGH}' fill-opacity='.06'/>"
            f"<rect {bar} y='{base - had:.1f}' height='{had:.1f}' fill='{_KEPT}'/>"
        )
        if came:
            parts.append(
                f"<rect {bar} y='{base - had - came:.1f}' height='{came:.1f}' fill='url(#ml-brought)' "
                f"stroke='{_NEW}' stroke-width='.8'/>"
            )
        if wide == 40 and np.isfinite(total[b]):
            parts.append(f"<text {middle} y='{_TOP - 3}'>{total[b]:.3g}</text>")
        parts.append(f"<text {middle} y='{base + 11}' fill-opacity='.75'>{b}</text></g>")
    key = "nothing leaves with this chunk"
    if flow.tokens.size:
        key = f"▨ brought by {_tokens(flow)}" if known else f"{_tokens(flow)} will leave"
    parts.append(
        f"<text x='4' y='{base + 26}'>{title}</text>"
        f"<text x='4' y='{base + 39}'><tspan fill='{_KEPT}'>■</tspan> what they had · {key}</text></svg>"
    )
    return "".join(parts)


def _sum(flow: Flow, b: int, known: bool) -> str:
    """How the mass of a landmark comes about."""
    told = f"landmark {b}: mass {flow.masses[b]:.4g}"
    if known and flow.tokens.size:
        told += (
            f" × {flow.rescale[b]:.4g} (maximum {flow.maxima[b]:.4g} → {flow.maxima_after[b]:.4g})"
            f" + {flow.weights[:, b].sum():.4g} of {_tokens(flow)} = {flow.after[b]:.4g}"
        )
    return told


def _tokens(flow: Flow) -> str:
    first, last = int(flow.tokens[0]), int(flow.tokens[-1])
    return f"token {first}" if first == last else f"tokens {first} to {last}"
