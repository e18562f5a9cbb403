"""Reading one declarator, and the parameter list of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .declarations import OUT_OF_SCOPE, THREAD_ATTRIBUTES, Parameter
from .tokens import Token, closing, closing_angle, split


def read_parameters(text: str, tokens: Sequence[Token]) -> tuple[Parameter, ...]:
    """The parameters between the parentheses of a kernel; ``tokens`` are tokens of ``text``.

    A buffer without an index gets the lowest one not taken, in order, as Metal numbers them.
    """
    parts = split(tokens)
    if len(parts) == 1 and [t.text for t in parts[0]] == ["void"]:
        return ()
    read = [_parameter(text, part) for part in parts if part]
    taken = {p.index for p in read if p.role == "buffer" and p.index is not None}
    result, following = [], 0
    for p in read:
        if p.role == "buffer" and p.index is None:
            while following in taken:
                following += 1
            taken.add(following)
            p = replace(p, index=following)
        result.append(p)
    return tuple(result)


def _parameter(text: str, tokens: Sequence[Token]) -> Parameter:
    plain: list[Token] = []
    attributes: list[tuple[str, str]] = []
    i = 0
    while i < len(tokens) and tokens[i].text != "=":
        if tokens[i].text == "[[":
            close = closing(tokens, i)
            for part in split(tokens[i + 1 : close]):
                argument = text[part[1].end : part[-1].offset] if len(part) > 2 else ""
                attributes.append((part[0].text, argument.strip()))
            i = close + 1
        else:
            plain.append(tokens[i])
            i += 1
    name = declarator(plain) or tokens[0]
    before = [t for t in plain if t.offset < name.offset]
    after = [t for t in plain if t.offset > name.offset]
    words = {t.text for t in before}
    attribute, argument = next(((a, x) for a, x in attributes if a in _KNOWN), ("", ""))
    index = int(argument, 0) if argument.isdigit() else None
    if any(w.startswith(("texture", "sampler", "depth2d", "imageblock")) for w in words):
        attribute = attribute if attribute in OUT_OF_SCOPE else "texture"
    if attribute in OUT_OF_SCOPE:
        role = "unsupported"
    elif attribute in THREAD_ATTRIBUTES:
        role = "thread"
    elif attribute == "threadgroup" or (not attribute and "threadgroup" in words):
        role, index = "threadgroup", index or 0
    elif attribute == "buffer" or words & {"device", "constant"}:
        role = "buffer"
    else:
        role = "unknown"
        attribute = attributes[0][0] if attributes else ""
    spelled = _spelling(text, before) + _spelling(text, after)
    return Parameter(name.text, spelled, role, attribute, index, name)


_KNOWN = frozenset({"buffer", "threadgroup", *THREAD_ATTRIBUTES, *OUT_OF_SCOPE})


def declarator(part: Sequence[Token]) -> Token | None:
    """The name that a declaration (or one more declarator) declares."""
    name = None
    i = 0
    while i < len(part):
        text = part[i].text
        if text in ("=", "{", ":") or (text == "[" and name is not None):
            break
        if text == "[[":
            i = closing(part, i)
        elif text == "<" and i and part[i - 1].kind == "name":
            i = closing_angle(part, i) or i
        elif text == "(":
            if i + 1 < len(part) and part[i + 1].text in ("*", "&"):
                name = next((t for t in part[i:] if t.kind == "name"), None)
                break
            i = closing(part, i)
        elif part[i].kind == "name":
            name = part[i]
        i += 1
    return name


def is_bit_field(part: Sequence[Token]) -> bool:
    return any(t.text == ":" for t in part)


def host_name(head: Sequence[Token]) -> str | None:
    for i, token in enumerate(head):
        if token.text == "host_name":
            return "".join(
                t.text.strip('"') for t in head[i : closing(head, i + 1)] if t.kind == "string"
            ) or None
    return None


def _spelling(text: str, tokens: Sequence[Token]) -> str:
    """The tokens as the user wrote them, one space where there was any."""
    out, end = "", None
    for token in tokens:
        out += (" " if end is not None and text[end : token.offset] else "") + token.text
        end = token.end
    return out
