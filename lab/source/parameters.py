"""Reading one declarator, and the parameter list of a kernel."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .declarations import OUT_OF_SCOPE, THREAD_ATTRIBUTES, Parameter
from .scope import out_of_scope
from .tokens import Token, closing, closing_angle, split


def read_parameters(text: str, tokens: Sequence[Token]) -> tuple[Parameter, ...]:
    """The parameters between the parentheses of a kernel; ``tokens`` are tokens of ``text``.

    A buffer without an index gets the lowest one not taken, in order, as Metal numbers them; so does a
    threadgroup argument. Where the compiler has to evaluate an index, that waits for ``numbered``.
    """
    parts = split(tokens)
    if len(parts) == 1 and [t.text for t in parts[0]] == ["void"]:
        return ()
    read = tuple(_parameter(text, part, n) for n, part in enumerate(parts) if part)
    return read if any(p.index_at for p in read) else numbered(read)


def numbered(parameters: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """``parameters`` with an index for each buffer and threadgroup argument that has none."""
    read = list(parameters)
    taken = {(p.role, p.index) for p in read}
    result = []
    for p in read:
        if p.role in ("buffer", "threadgroup") and p.index is None:
            index = next(i for i in itertools.count() if (p.role, i) not in taken)
            taken.add((p.role, index))
            p = replace(p, index=index)
        result.append(p)
    return tuple(result)


def _parameter(text: str, tokens: Sequence[Token], number: int) -> Parameter:
    plain: list[Token] = []
    attributes: list[tuple[str, int, int]] = []  # name, and where its argument stands
    i = 0
    while i < len(tokens) and tokens[i].text != "=":
        if tokens[i].text == "[[":
            close = closing(tokens, i)
            for part in split(tokens[i + 1 : close]):
                if part:
                    inside = (part[1].end, part[-1].offset) if len(part) > 2 else (part[0].end, part[0].end)
                    attributes.append((part[0].text, *inside))
            i = close + 1
        else:
            plain.append(tokens[i])
            i += 1
    name = declarator(plain) if len(plain) > 1 and plain[-1].text not in ("*", "&") else None
    before = [t for t in plain if name is None or t.offset < name.offset]
    after = [t for t in plain if name is not None and t.offset > name.offset]
    words = {t.text for t in before}
    present_at = next(((a[1], a[2]) for a in attributes if a[0] == "function_constant"), None)
    attribute, start, end = next((a for a in attributes if a[0] in _KNOWN), ("", 0, 0))
    argument = text[start:end].strip()
    index = int(argument) if argument.isdecimal() else None
    index_at = (start, end) if argument and index is None and attribute in ("buffer", "threadgroup") else None
    beyond = out_of_scope(before)
    if beyond is not None:
        attribute = attribute if attribute in OUT_OF_SCOPE else beyond[1]
    if beyond is not None or attribute in OUT_OF_SCOPE:
        role = "unsupported"
    elif attribute in THREAD_ATTRIBUTES:
        role = "thread"
    elif attribute == "threadgroup" or (not attribute and "threadgroup" in words):
        role = "threadgroup"
    elif attribute == "buffer" or words & {"device", "constant"}:
        role = "buffer"
    else:
        role = "unknown"
        attribute = attributes[0][0] if attributes else ""
    spelled = spelling(text, before) + spelling(text, after)
    shown = name.text if name else f"argument{number}"
    return Parameter(shown, spelled, role, attribute, index, name or tokens[0], index_at, present_at)


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
            return (
                "".join(t.text.strip('"') for t in head[i : closing(head, i + 1)] if t.kind == "string")
                or None
            )
    return None


def spelling(text: str, tokens: Sequence[Token]) -> str:
    """The tokens as the user wrote them, one space where there was any."""
    out, end = "", None
    for token in tokens:
        out += (" " if end is not None and text[end : token.offset] else "") + token.text
        end = token.end
    return out
