"""Tokens of textual LLVM IR."""

from __future__ import annotations

import bisect
import re
from typing import NamedTuple

from .errors import IRError

__all__ = ["Source", "Token", "unescape"]

_TOKEN = re.compile(
    r"""
    (?P<space>   (?: \s+ | ;[^\n]* )+ )
  | (?P<label>   (?: [-A-Za-z$._0-9]+ | "[^"]*" ) : )
  | (?P<bytes>   c"[^"]*" )
  | (?P<string>  "[^"]*" )
  | (?P<local>   % (?: [-A-Za-z$._0-9]+ | "[^"]*" ) )
  | (?P<global>  @ (?: [-A-Za-z$._0-9]+ | "[^"]*" ) )
  | (?P<comdat>  \$ (?: [-A-Za-z$._0-9]+ | "[^"]*" ) )
  | (?P<meta>    ! [-A-Za-z$._0-9\\]* )
  | (?P<group>   \# [0-9]+ )
  | (?P<record>  \# [a-z_]+ )
  | (?P<hex>     0x [HRKLM]? [0-9A-Fa-f]+ )
  | (?P<decimal> [-+]? [0-9]+ \. [0-9]* (?: [eE] [-+]? [0-9]+ )? )
  | (?P<integer> -? [0-9]+ )
  | (?P<word>    [A-Za-z_] [A-Za-z0-9_.]* )
  | (?P<mark>    \.\.\. | [\[\](){}<>,=*|:] )
  | (?P<end>     \Z )
    """,
    re.VERBOSE,
)
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|\\)")


class Token(NamedTuple):
    """``text`` holds names without sigil and quotes, strings without quotes but with their escapes."""

    kind: str
    text: str
    start: int
    end: int


class Source:
    """A text of IR, its tokens, and the line of each."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._starts = [0, *(m.end() for m in re.finditer("\n", text))]
        self.tokens = self._split()

    def line(self, position: int) -> int:
        """Line of a position in the text, counted from 1."""
        return bisect.bisect_right(self._starts, position)

    def _split(self) -> list[Token]:
        tokens, position, match = [], 0, _TOKEN.match
        while True:
            found = match(self.text, position)
            if found is None:
                raise IRError(f"the character {self.text[position]!r}", self.line(position))
            kind, end = found.lastgroup or "", found.end()
            if kind != "space":
                tokens.append(Token(kind, _strip(kind, found.group()), position, end))
                if kind == "end":
                    return tokens
            position = end


def _strip(kind: str, text: str) -> str:
    match kind:
        case "local" | "global" | "comdat":
            return _name(text[1:])
        case "label":
            return _name(text[:-1])
        case "meta" | "group" | "record":
            return text[1:]
        case "string":
            return text[1:-1]
        case "bytes":
            return text[2:-1]
        case _:
            return text


def _name(text: str) -> str:
    return unescape(text[1:-1]).decode("utf-8", "surrogateescape") if text.startswith('"') else text


def unescape(text: str) -> bytes:
    """The bytes that a string of IR stands for."""
    raw = text.encode("utf-8", "surrogateescape")
    return _ESCAPE.sub(lambda m: b"\\" if m[1] == b"\\" else bytes([int(m[1], 16)]), raw)
