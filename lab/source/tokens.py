"""Tokens of Metal source, each with its place.

The lexer runs on preprocessed text, so it meets no directive but ``#pragma`` and no comment; it takes
both in its stride, since the same lexer reads a line of the user's own text to align columns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<space>  [ \t\r\f\v]+ | \\\n )
  | (?P<newline>\n )
  | (?P<comment>//[^\n]* | /\*.*?(?:\*/|\Z) )
  | (?P<string> (?:u8|[uUL])?"(?:\\.|[^"\\\n])*"? )
  | (?P<char>   (?:u8|[uUL])?'(?:\\.|[^'\\\n])*'? )
  | (?P<number> \.?[0-9](?:[eEpP][+-]|'[0-9A-Za-z]|[0-9A-Za-z_.])* )
  | (?P<name>   [A-Za-z_$][A-Za-z0-9_$]* )
  | (?P<punct>  \[\[ | \]\] | :: | -> | \+\+ | -- | << | && | \|\| | \.\.\. | [<>=!]= | [-+*/%&|^]= | . )
    """,
    re.VERBOSE | re.DOTALL,
)

_OPENERS = {"(": ")", "[": "]", "{": "}", "[[": "]]"}
_CLOSERS = frozenset(_OPENERS.values())


@dataclass(frozen=True, slots=True)
class Token:
    """One token: its kind (name, number, string, char, punct), text, and place.

    ``offset`` counts characters from the start of the text; ``line`` and ``column`` count from 1.
    """

    kind: str
    text: str
    offset: int
    line: int
    column: int

    @property
    def end(self) -> int:
        """Offset of the first character after the token."""
        return self.offset + len(self.text)


def tokenize(text: str) -> list[Token]:
    """All tokens of ``text`` in order, without spaces, comments and preprocessor lines.

    Never fails: a half-typed string or comment ends where the text does, and what remains unknown is a
    one-character ``punct``. ``]]`` is two tokens where it closes two subscripts, as in ``a[b[0]]``.
    """
    tokens: list[Token] = []
    line, line_start, at = 1, 0, 0
    attributes: list[str] = []  # open brackets, to tell "]]" from "]" "]"
    while at < len(text):
        match = _TOKEN.match(text, at)
        assert match is not None  # the last alternative takes any character
        kind, piece = match.lastgroup or "punct", match.group()
        column = at - line_start + 1
        if kind == "punct" and piece == "#" and not text[line_start:at].strip():
            end = text.find("\n", at)  # a directive that the preprocessor left, such as #pragma
            at = len(text) if end < 0 else end
            continue
        if kind == "punct":
            if piece == "]]" and (not attributes or attributes[-1] != "[["):
                piece = "]"
            if piece in ("[", "[["):
                attributes.append(piece)
            elif piece in ("]", "]]") and attributes:
                attributes.pop()
        if kind not in ("space", "newline", "comment"):
            tokens.append(Token(kind, piece, at, line, column))
        newlines = piece.count("\n")
        if newlines:
            line += newlines
            line_start = at + piece.rfind("\n") + 1
        at += len(piece)
    return tokens


def closing(tokens: Sequence[Token], start: int) -> int:
    """Index of the bracket that closes the one at ``start``; the last index if none does."""
    depth = 0
    for i in range(start, len(tokens)):
        text = tokens[i].text
        if tokens[i].kind != "punct":
            continue
        if text in _OPENERS:
            depth += 1
        elif text in _CLOSERS:
            depth -= 1
            if depth == 0:
                return i
    return len(tokens) - 1


def pairs(tokens: Sequence[Token]) -> dict[int, int]:
    """For each closing bracket the index of the one that it closes."""
    found, open_ = {}, []
    for i, token in enumerate(tokens):
        if token.kind != "punct":
            continue
        if token.text in _OPENERS:
            open_.append(i)
        elif token.text in _CLOSERS and open_:
            found[i] = open_.pop()
    return found


def closing_angle(tokens: Sequence[Token], start: int, *, certain: bool = False) -> int | None:
    """Index of the ``>`` that closes the ``<`` at ``start``, or None where it is a comparison.

    ``certain``: it is none, as after ``template``, so that ``&&`` and ``||`` may stand within.
    """
    depth, i = 0, start
    while i < len(tokens):
        text = tokens[i].text
        if tokens[i].kind == "punct":
            if text == "<" and (i == start or tokens[i - 1].kind == "name"):
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return i
            elif text in _OPENERS:
                i = closing(tokens, i)
            elif text in (";", "}") or text in _CLOSERS or (text in ("&&", "||") and not certain):
                return None
        i += 1
    return None


def split(tokens: Sequence[Token], separator: str = ",") -> list[list[Token]]:
    """``tokens`` cut at each ``separator`` outside every bracket and template argument list."""
    parts: list[list[Token]] = [[]]
    i = 0
    while i < len(tokens):
        token = tokens[i]
        stop = i
        if token.kind == "punct":
            if token.text in _OPENERS:
                stop = closing(tokens, i)
            elif token.text == "<" and i and tokens[i - 1].kind == "name":
                stop = closing_angle(tokens, i) or i
            elif token.text == separator:
                parts.append([])
                i += 1
                continue
        parts[-1].extend(tokens[i : stop + 1])
        i = stop + 1
    return parts if parts != [[]] else []
