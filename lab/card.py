"""The card below a ``%%metal`` cell: its kernels, their buffers, how they will run."""

from __future__ import annotations

import keyword
from dataclasses import dataclass
from html import escape

from .kernel import Kernel, Library

_STYLE = """
.metal-card{font-size:13px;line-height:1.5;margin:2px 0}
.metal-card table{border-collapse:collapse;margin:2px 0 4px}
.metal-card td,.metal-card th{padding:1px 12px 1px 0;text-align:left}
.metal-card td,.metal-card th{background:none;border:none;font-weight:normal}
.metal-card code{font-family:var(--jp-code-font-family,monospace);font-size:12px;
background:none!important;padding:0!important}
.metal-card .dim{color:var(--jp-content-font-color2,#666)}
.metal-card .written{font-weight:600}
.metal-card pre{margin:4px 0;white-space:pre-wrap}
"""


@dataclass(frozen=True)
class Card:
    """A rich display of a library. ``seconds`` is how long reading it took."""

    library: Library
    seconds: float

    def _repr_html_(self) -> str:
        parts = [f"<style>{_STYLE}</style><div class='metal-card'>"]
        for kernel in self.library.values():
            name, how = escape(kernel.name), escape(_how(kernel))
            parts.append(f"<div><code><b>{name}</b></code> <span class='dim'>{how}</span></div>")
            parts.append("<table>")
            for index, name, kind, use in rows(kernel):
                css = " class='written'" if use == "written" else ""
                parts.append(
                    f"<tr><td class='dim'>{escape(index)}</td><td><code>{escape(name)}</code></td>"
                    f"<td><code>{escape(kind)}</code></td><td{css}>{use}</td></tr>"
                )
            parts.append("</table>")
        if self.library.warnings:
            text = "\n".join(w.render() for w in self.library.warnings)
            parts.append(f"<pre>{escape(text)}</pre>")
        parts.append(f"<div class='dim'>{escape(_foot(self))}</div></div>")
        return "".join(parts)

    def __repr__(self) -> str:
        lines = []
        for kernel in self.library.values():
            lines.append(f"{kernel.name}  {_how(kernel)}")
            table = rows(kernel)
            widths = [max((len(row[i]) for row in table), default=0) for i in range(4)]
            for row in table:
                lines.append(
                    "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
                )
        lines += [w.render() for w in self.library.warnings]
        lines.append(_foot(self))
        return "\n".join(lines)


def is_python_name(name: str) -> bool:
    """Whether a kernel can be a variable under its own name."""
    return name.isidentifier() and not keyword.iskeyword(name)


def rows(kernel: Kernel) -> list[tuple[str, str, str, str]]:
    """Index, name, type and use of each buffer and threadgroup argument."""
    signature = kernel.signature
    found = []
    for p in signature.buffers:
        use = "written" if signature.writes(p) else "read"
        found.append((f"buffer({p.index})", p.name, str(signature.types[p.name]), use))
    for p in signature.threadgroup_arguments:
        found.append((f"threadgroup({p.index})", p.name, str(signature.types[p.name]), "shared"))
    return found


def _how(kernel: Kernel) -> str:
    about = kernel.description
    attributes = ", ".join(kernel.signature.attributes)
    engine = kernel.engine if about is None else f"{about.engine}, {about.executor}"
    if about is None:
        when = "compiles at its first call"
    elif about.from_cache:
        when = f"from the cache in {about.compile_seconds * 1e3:.0f} ms"
    else:
        when = f"compiled in {about.compile_seconds * 1e3:.0f} ms"
    return " · ".join(part for part in (attributes, f"engine {engine}", when) if part)


def _foot(card: Card) -> str:
    count = len(card.library)
    if not count:
        return "No kernels: a kernel begins with `kernel void` or `[[kernel]] void`."
    names = [name for name in card.library if not is_python_name(name)]
    other = ""
    if names:
        other = f" No Python name, so only in the library that --name keeps: {', '.join(names)}."
    return f"{count} kernel{'s' if count > 1 else ''} read in {card.seconds * 1e3:.0f} ms.{other}"
