"""The user's source through clang's preprocessor, with a way back to the user's own lines and columns."""

from __future__ import annotations

import difflib
import functools
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import resources
from ..errors import CompileError
from . import diagnostics
from .diagnostics import Diagnostic, Place
from .scope import HEADERS
from .tokens import tokenize
from .toolchain import clang

CELL = "cell"  # how messages call source that is no file

# What a Mac's compiler predefines, as far as sources ask for it: Metal 3.2 on macOS.
_PREDEFINED = {
    "__METAL__": "1",
    "__METAL_CPP__": "1",
    "__METAL_MACOS__": "1",
    "__METAL_VERSION__": "320",
    "__HAVE_BFLOAT__": "1",
    "__HAVE_SIMDGROUP_MATRIX__": "1",
    "__HAVE_SIMDGROUP_REDUCTION__": "1",
    "__HAVE_SIMDGROUP_BALLOT__": "1",
    "__APPLE__": "1",
    "__METAL_MEMORY_SCOPE_SYSTEM__": "3",
    "TARGET_OS_OSX": "1",
    "TARGET_OS_IPHONE": "0",
}

_MARKER = re.compile(r'^# (\d+) "((?:[^"\\]|\\.)*)"(.*)$')
_LINE = re.compile(r'^\s*#\s*(?:line\s+)?(\d+)\s+"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Preprocessed:
    """Preprocessed text and, for each of its lines, the file and line it came from.

    ``files`` holds the text of every file of the user that took part (``cell`` for the cell itself),
    ``paths`` where those lie that were read from disk on the way; ``warnings`` are the preprocessor's.
    """

    text: str
    lines: tuple[tuple[str, int], ...]
    files: Mapping[str, str]
    paths: tuple[Path, ...] = ()
    warnings: tuple[Diagnostic, ...] = ()

    def origin(self, line: int, column: int) -> Place | None:
        """Place in the user's source of a position (from 1) in ``text``; None outside the user's files."""
        if not 1 <= line <= len(self.lines):
            return None
        file, original = self.lines[line - 1]
        if file not in self.files:
            return None
        columns = _column_map(self.line_text(line), self.line_of(Place(file, original, 1)))
        best = 1
        for ours, theirs, exact in columns:
            if ours > column:
                break
            best = theirs + (column - ours if exact else 0)
        return Place(file, original, best)

    def path_of(self, file: str) -> Path | None:
        """Where a file of ``files`` lies that was read on the way; None for the source itself."""
        read = list(self.files)[len(self.files) - len(self.paths) :]
        return dict(zip(read, self.paths, strict=True)).get(file)

    def line_text(self, line: int) -> str:
        """Line ``line`` (from 1) of ``text``."""
        lines = _lines(self.text)
        return lines[line - 1] if 1 <= line <= len(lines) else ""

    def line_of(self, place: Place) -> str:
        """The line of the user's own text that ``place`` lies in."""
        lines = _lines(self.files.get(place.file, ""))
        return lines[place.line - 1].rstrip("\r") if 1 <= place.line <= len(lines) else ""


@functools.lru_cache(maxsize=64)
def _lines(text: str) -> list[str]:
    return text.split("\n")


@functools.lru_cache(maxsize=64)
def _column_map(ours: str, theirs: str) -> list[tuple[int, int, bool]]:
    """(our column, their column, same token) for each token of our line; macros go to their name."""
    a, b = tokenize(ours), tokenize(theirs)
    matcher = difflib.SequenceMatcher(None, [t.text for t in a], [t.text for t in b], autojunk=False)
    pairs: list[tuple[int, int, bool]] = []
    macro = b[0].column if b else 1
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if j2 > j1 and tag != "equal":
            macro = b[j1].column  # their tokens that vanished: a macro's name
        for i in range(i1, i2):
            same = tag == "equal"
            pairs.append((a[i].column, b[j1 + i - i1].column if same else macro, same))
    if pairs and pairs[-1][2]:  # the end of the line, where a missing semicolon is reported
        pairs.append((a[-1].column + len(a[-1].text), pairs[-1][1] + len(a[-1].text), True))
    return pairs


@functools.cache
def _stubs() -> str:
    """A folder of empty files named like our headers: those are precompiled and enter later."""
    folder = tempfile.TemporaryDirectory(prefix="metal-lab-headers-")
    _keep.append(folder)
    include = resources.include()
    for header in include.rglob("*"):
        if header.is_file():
            stub = Path(folder.name) / header.relative_to(include)
            stub.parent.mkdir(parents=True, exist_ok=True)
            stub.touch()
    for name in HEADERS:
        (Path(folder.name) / name).touch()
    return folder.name


_keep: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def preprocess(
    text: str,
    path: Path | None = None,
    *,
    defines: Mapping[str, str] | None = None,
    include: Sequence[Path] = (),
    label: str = CELL,
) -> Preprocessed:
    """Run the preprocessor over ``text``.

    ``path`` is the file the text was read from, whose neighbours ``#include "..."`` finds; without one
    the working directory serves. ``include`` are files read before the text, and folders to search for what
    it includes; ``label`` is how messages call a text that is no file. Raises CompileError with places in
    the user's own text.
    """
    name = path.name if path else label
    arguments = ["-E", "-x", "c++", "-std=c++17", "-undef", "-nostdinc", "-fno-caret-diagnostics"]
    arguments += ["-fdiagnostics-print-source-range-info", "-fno-color-diagnostics"]
    arguments += ["-isystem", _stubs(), "-iquote", str(path.parent if path else Path.cwd())]
    for file in include:
        arguments += ["-I", str(file)] if file.is_dir() else ["-iquote", str(file.parent)]
    arguments += [f"-D{key}={value}" for key, value in _PREDEFINED.items()]
    arguments += [f"-D{key}={value}" for key, value in (defines or {}).items()]
    for file in include:
        arguments += [] if file.is_dir() else ["-include", str(file)]
    done = clang([*arguments, "-"], f'# 1 "{_escaped(name)}"\n{text}')

    files = {name: text, **{k: v for k, v in _renamed(text).items() if k != name}}
    paths: list[Path] = []
    shown: dict[str, str] = {}

    def users_file(raw: str) -> str | None:
        """Name under which the user knows the file the preprocessor calls ``raw``."""
        if raw in files:
            return raw
        if raw not in shown:
            file = Path(raw)
            inside = raw.startswith(("<", _stubs())) or not file.is_file()
            short = "" if inside else _short(file, path)
            shown[raw] = str(file.resolve()) if short in files else short
            if shown[raw] and shown[raw] not in files:
                files[shown[raw]] = file.read_text(encoding="utf-8", errors="replace")
                paths.append(file.resolve())
        return shown[raw] or None

    out: list[str] = []
    lines: list[tuple[str, int]] = []
    current, number = "", 0
    for line in done.stdout.split("\n"):
        marker = _MARKER.match(line)
        if marker:
            number = int(marker[1]) - 1
            current = users_file(_unescaped(marker[2])) or ""
            out.append("")
            lines.append(("", 0))
        else:
            number += 1
            out.append(line)
            lines.append((current, number))
    result = Preprocessed("\n".join(out), tuple(lines), files, tuple(paths))
    if not done.stderr:
        return result

    def locate(raw: str, line: int, column: int) -> Place | None:
        known = users_file(raw)
        return Place(known, line, column) if known else None

    found = diagnostics.in_users_terms(diagnostics.parse(done.stderr), locate, result.line_of)
    if done.returncode:
        wrong = diagnostics.errors(found)
        raise CompileError("\n".join(d.render() for d in wrong) or done.stderr.strip(), found)
    return replace(result, warnings=tuple(d for d in found if d.place is not None))


def _renamed(text: str) -> dict[str, str]:
    """The parts of ``text`` that line directives give to files of other names, by name.

    Names in angle brackets are nobody's: what they hold has no place in the user's source.
    """
    parts: dict[str, dict[int, str]] = {}
    part, number = None, 0
    for line in text.split("\n"):
        found = _LINE.match(line)
        if found:
            name = _unescaped(found[2])
            outside = name.startswith("<") or Path(name).is_file()
            part, number = None if outside else parts.setdefault(name, {}), int(found[1])
        else:
            if part is not None:
                part[number] = line
            number += 1
    return {k: "\n".join(v.get(i, "") for i in range(1, max(v, default=0) + 1)) for k, v in parts.items()}


_VALUE = "msl_macro_value"


def macro_values(
    names: Sequence[str],
    text: str,
    path: Path | None = None,
    *,
    defines: Mapping[str, str] | None = None,
    include: Sequence[Path] = (),
) -> dict[str, str]:
    """What those of ``names`` that are macros at the end of ``text`` stand for, by name.

    The other arguments are those of ``preprocess``.
    """
    asked = [f"#ifdef {name}\n{_VALUE} {i} {name}\n#endif\n" for i, name in enumerate(names)]
    done = preprocess(f"{text}\n\n{''.join(asked)}", path, defines=defines, include=include)
    found = {}
    for line in done.text.splitlines():
        words = line.split(maxsplit=2)
        if words[:1] == [_VALUE]:
            found[names[int(words[1])]] = words[2].strip() if len(words) > 2 else ""
    return found


def _short(file: Path, beside: Path | None) -> str:
    """The file's path as a user would write it: relative to the source or the working directory."""
    for base in (beside.parent if beside else None, Path.cwd()):
        if base is not None and file.resolve().is_relative_to(base.resolve()):
            return str(file.resolve().relative_to(base.resolve()))
    return file.name


def _escaped(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')


def _unescaped(name: str) -> str:
    return re.sub(r"\\(.)", r"\1", name)
