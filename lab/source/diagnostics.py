"""What the compiler said, in the user's own lines and in Metal's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

_HEAD = re.compile(
    r"^(?P<file>[^\n:{}]+|<[\w -]+>):(?P<line>\d+):(?P<column>\d+):"
    r"(?P<ranges>(?:\{\d+:\d+-\d+:\d+\})*):? (?P<level>fatal error|error|warning|note): (?P<text>.*)$"
)
_RANGE = re.compile(r"\{(\d+):(\d+)-(\d+):(\d+)\}")

# Our own spellings, and OpenCL's, have no place in a message about Metal.
_WORDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (
            r"^default initialization of an object of const type '(?:const )?__global (?:const )?([^']*)'",
            r"a constant needs a value where it is declared: '\1'",
        ),
        (r" must reside in global or constant address space", " must be in constant memory"),
        (r"(?<=[*&]) ?__private\b|(?<=')(const )?__private (?=[^'*&]*')", r"\1"),
        (r"\bconst __global_host\b|\b__global_host const\b|\b__global_host\b", "constant"),
        (r"\b__global\b", "device"),
        (r"\b__local\b", "threadgroup"),
        (r"\b__private\b", "thread"),
        (r"\b__generic ", ""),
        (r"\b(?:metal::)?packed_vec<((?:unsigned )?\w+), (\d)>", r"packed_\1\2"),
        (r"\b(?:metal::)?vec<((?:unsigned )?\w+), (\d)>", r"\1\2"),
        (r"\b(?:metal::)?matrix<(\w+), (\d), (\d)>", r"\1\2x\3"),
        (r"\b(?:metal::)?atomic<((?:unsigned )?\w+)>", r"atomic_\1"),
        (r"unsigned (int|char|short|long)(?=\d)", r"u\1"),
        (r"(?<=packed_)unsigned (?=\w)|(?<=atomic_)unsigned (?=\w)", "u"),
        (r"'[^']*\bmsl_[^']*' \(aka ('[^']*')\)", r"\1"),
        (r"\b__bf16\b", "bfloat"),
        (r"(\w)__msl\b", r"\1"),
        (r"\bmsl_id_(\w+)", r"\1"),
        (r"\(anonymous namespace\)::", ""),
        (r" \[-W[\w+#=,-]+\]$", ""),
        (r"^function ('.*') has internal linkage but is not", r"function \1 is used but not"),
        (r"^inline function ('.*') is not defined$", r"function \1 is used but not defined"),
        (r"^use of type '(double\d?)' requires .*", r"'\1' is not supported in Metal"),
        (r" in C\+\+ for OpenCL\b[^']*", " in Metal"),
        (r"\bC\+\+ for OpenCL\b|\bOpenCL\b", "Metal"),
    )
)


@dataclass(frozen=True)
class Place:
    """A position in what the user wrote: file (``cell`` for a cell), line and column from 1."""

    file: str
    line: int
    column: int


@dataclass(frozen=True)
class Diagnostic:
    """One message. ``level`` is error, warning or note; ``ranges`` are columns of ``place.line``."""

    level: str
    text: str
    place: Place | None
    ranges: tuple[tuple[int, int], ...] = ()
    source_line: str = ""
    notes: tuple[Diagnostic, ...] = field(default=())

    def render(self) -> str:
        """``file:line:column: level: text``, the line itself, and a caret under the place."""
        if self.place is None:
            head = f"{self.level}: {self.text}"
        else:
            p = self.place
            head = f"{p.file}:{p.line}:{p.column}: {self.level}: {self.text}"
            if self.source_line.strip():
                shown = self.source_line.replace("\t", " ")
                marks = [" "] * max(len(shown) + 1, p.column)
                for first, last in self.ranges:
                    for c in range(max(first, 1), min(last, len(shown) + 1)):
                        marks[c - 1] = "~"
                marks[p.column - 1] = "^"
                gutter = f"{p.line:5d}"
                head += f"\n{gutter} | {shown}\n{' ' * len(gutter)} | {''.join(marks).rstrip()}"
        return "\n".join([head, *(note.render() for note in self.notes)])


@dataclass(frozen=True)
class RawDiagnostic:
    """One message as the compiler printed it, with its own idea of file and position."""

    file: str
    line: int
    column: int
    level: str
    text: str
    ranges: tuple[tuple[int, int, int, int], ...]


def parse(stderr: str) -> list[RawDiagnostic]:
    """The messages in clang's output (``-fno-caret-diagnostics -fdiagnostics-print-source-range-info``)."""
    found = []
    for line in stderr.splitlines():
        head = _HEAD.match(line)
        if head:
            ranges = tuple(
                (int(a), int(b), int(c), int(d)) for a, b, c, d in _RANGE.findall(head["ranges"] or "")
            )
            level = "error" if head["level"] == "fatal error" else head["level"]
            found.append(
                RawDiagnostic(
                    head["file"], int(head["line"]), int(head["column"]), level, head["text"], ranges
                )
            )
        elif line.startswith(("error: ", "clang: error: ")):
            found.append(RawDiagnostic("", 0, 0, "error", line.split("error: ", 1)[1], ()))
    return found


def in_users_terms(
    raw: Iterable[RawDiagnostic],
    locate: Callable[[str, int, int], Place | None],
    line_of: Callable[[Place], str],
) -> list[Diagnostic]:
    """Messages placed in the user's source: ``locate`` maps the compiler's positions, or gives None.

    A message from inside our headers is moved to the user's line that led there, taken from its notes;
    notes without a place in the user's source are dropped.
    """
    groups: list[list[RawDiagnostic]] = []
    for message in raw:
        if message.level == "note" and groups:
            groups[-1].append(message)
        elif message.level != "note":
            groups.append([message])
    result: list[Diagnostic] = []
    for group in groups:
        placed = [_place(message, locate, line_of) for message in group]
        main, notes = placed[0], [n for n in placed[1:] if n.place is not None and _useful(n.text)]
        text = main.text
        if main.place is None:
            caller = next((n for n in placed[1:] if n.place is not None), None)
            if caller is not None:
                text = re.sub(r"^static assertion failed(?: due to requirement '.*?')?: ", "", text)
                text += f" {caller.text}" if caller.text.startswith("to match this") else ""
                main = caller
                notes = [n for n in notes if n.place != caller.place]
        elif not notes and _NO_MATCH.match(text):
            text += _reason([n.text for n in placed[1:]])
        level = placed[0].level
        diagnostic = Diagnostic(level, text, main.place, main.ranges, main.source_line, tuple(notes))
        if diagnostic not in result and not any(_guessed(d, diagnostic) for d in result):
            result.append(diagnostic)
    return result


_NO_MATCH = re.compile(r"no viable overloaded '.?='|no matching function for call to ")
_REASONS = (
    (re.compile(r"no known conversion from (.*?) to '(?:const )?(.*?)'"), r": no conversion from \1 to '\2'"),
    (re.compile(r"candidate template ignored: could not match (.*)"), r": could not match \1"),
    (re.compile(r"substitution failure \[with (.*?)\]"), r" with \1"),
)


def _reason(notes: Sequence[str]) -> str:
    """Why our headers' functions do not take a call, from the notes on them."""
    for note in notes:
        for pattern, words in _REASONS:
            found = pattern.search(note)
            if found:
                return found.expand(words)
    return ""


def _guessed(first: Diagnostic, other: Diagnostic) -> bool:
    """Whether ``other`` is about the name that ``first`` only guessed."""
    return first.place is not None and first.place == other.place and "; did you mean" in first.text


def errors(diagnostics: Sequence[Diagnostic]) -> list[Diagnostic]:
    """Those that stop the compilation."""
    return [d for d in diagnostics if d.level == "error"]


def _useful(note: str) -> bool:
    return not note.startswith("expanded from macro")


def _place(
    raw: RawDiagnostic,
    locate: Callable[[str, int, int], Place | None],
    line_of: Callable[[Place], str],
) -> Diagnostic:
    text = raw.text
    for pattern, replacement in _WORDS:
        text = pattern.sub(replacement, text)
    text = re.sub(r"'([^']+)' \(aka '\1'\)", r"'\1'", text)
    place = locate(raw.file, raw.line, raw.column) if raw.line else None
    if place is None:
        return Diagnostic(raw.level, text, None)
    ranges = []
    for line, first, last_line, last in raw.ranges:
        if line == last_line == raw.line:
            begin, end = locate(raw.file, line, first), locate(raw.file, line, last)
            if begin and end and begin.line == end.line == place.line:
                ranges.append((begin.column, max(end.column, begin.column + 1)))
    return Diagnostic(raw.level, text, place, tuple(ranges), line_of(place))
