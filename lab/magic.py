"""``%%metal`` and ``%metal``: Metal in notebook cells."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import time
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments
from IPython.display import Code, display

from . import doctor
from .card import Card, is_python_name
from .engines import registry
from .kernel import Kernel, Library, compile
from .source.compiler import MATH

SYSTEMS = ("o1", "qsa")  # attention systems that ``--into`` takes: modules of this package
_REPEATED: dict[str, Any] = {"action": "append", "default": []}


@magics_class
class MetalMagics(Magics):
    """The lab's magics. One default engine per notebook."""

    engine = "auto"

    @magic_arguments("%metal")
    @argument("-e", "--engine", choices=registry.NAMES, help="Engine to run the cell's kernels on.")
    @argument("-D", "--define", metavar="NAME=VALUE", help="Define a macro; repeatable.", **_REPEATED)
    @argument("-C", "--constant", metavar="NAME=VALUE", help="Give a function constant.", **_REPEATED)
    @argument(
        "-I",
        "--include",
        metavar="FILE",
        help="Read FILE first, or search a folder; repeatable.",
        **_REPEATED,
    )
    @argument("--math", choices=tuple(MATH), default="safe", help="Floating-point freedom (default: safe).")
    @argument("--into", choices=SYSTEMS, help="Put the cell's kernels in the place of a system's own.")
    @argument("--isolate", action="store_true", help="Run the cell's kernels in a process of their own.")
    @argument("--name", help="Also keep the cell's kernels as a library under this name.")
    @argument("--quiet", action="store_true", help="Show no card.")
    @cell_magic("metal")  # type: ignore[arg-type]
    def cell(self, line: str, cell: str) -> None:
        """Compile the Metal source in this cell and define each of its kernels as a Python function.

        A kernel is called as ``name(buffers..., grid=threads, threadgroup=threads_per_group)`` and gives
        the buffers it writes as new MLX arrays. Options may use Python values, as in ``-D N={n}``.
        """
        options = _parse(self.cell.parser, line)
        if options.name is not None and not is_python_name(options.name):
            raise UsageError(f"--name takes a Python name, not {options.name!r}.")
        started = time.perf_counter()
        library = compile(
            _as_source(cell),
            name=options.name,
            defines=dict(_define(text) for text in options.define),
            constants=dict(_constant(text) for text in options.constant),
            include=options.include,
            engine=options.engine or self.engine,
            math=options.math,
            isolate=options.isolate,
        )
        seconds = time.perf_counter() - started
        if len(library) == 1:  # one kernel: its compile time belongs to the cell
            next(iter(library.values())).describe()
        replacement = None
        if options.into:  # a kernel that does not fit is refused before anything is defined
            replacement = importlib.import_module(f".{options.into}", __package__).replace(library)
        self._define_in_notebook(library, options.name)
        if not options.quiet:
            display(Card(library, seconds))
        if replacement is not None:
            print(replacement)

    def _define_in_notebook(self, library: Library, name: str | None) -> None:
        values: dict[str, Any] = {k: v for k, v in library.items() if is_python_name(k)}
        if name:
            values[name] = library
        assert self.shell is not None
        self.shell.push(values)

    @line_magic("metal")  # type: ignore[arg-type]
    def line(self, line: str) -> Any:
        """``%metal kernels`` lists the notebook's kernels, ``%metal source NAME`` shows one's source,
        ``%metal engine [NAME]`` tells or sets the engine of the cells to come, ``%metal doctor`` says what
        works on this machine.
        """
        words = line.split()
        verbs = {"kernels": 0, "engine": 1, "source": 1, "doctor": 0}
        verb = words[0] if words else ""
        if verb not in verbs or len(words) - 1 > verbs[verb]:
            raise UsageError("%metal takes one of: kernels, engine [NAME], source NAME, doctor.")
        if verb == "kernels":
            return self._kernels()
        if verb == "engine":
            return self._engine(words[1:])
        if verb == "source":
            return self._source(words[1:])
        print(doctor.examine().text())
        return None

    def _known(self) -> dict[str, Kernel]:
        assert self.shell is not None
        names = self.shell.user_ns.items()
        return {k: v for k, v in names if isinstance(v, Kernel) and not k.startswith("_")}

    def _kernels(self) -> None:
        found = self._known()
        print("\n".join(repr(kernel) for kernel in found.values()) or "No kernels yet: run a %%metal cell.")

    def _engine(self, words: list[str]) -> None:
        if words:
            registry.engine(words[0])
            self.engine = words[0]
        chosen = registry.engine(self.engine).name
        how = "" if self.engine == chosen else f" ({self.engine})"
        print(f"Kernels of new cells run on {chosen}{how}.")

    def _source(self, words: list[str]) -> Code:
        found = self._known()
        if not words or words[0] not in found:
            known = ", ".join(found) or "none yet"
            raise UsageError(f"%metal source takes the name of a kernel of this notebook: {known}.")
        return Code(found[words[0]].source, language="cpp")


def _parse(parser: Any, line: str) -> Any:
    """The options of the magic line. Quotes group and are removed."""
    unresolved = re.search(r"\{\s*[A-Za-z_][^{}]*\}", line)  # {1, 2} is an initialiser, from {{1, 2}}
    if unresolved:
        raise UsageError(f"{unresolved.group()} in the %%metal line is not known to this notebook.")
    try:
        words = shlex.split(line)
    except ValueError as problem:
        raise UsageError(f"The %%metal line has a quote that does not close ({problem}).") from None
    return parser.parse_args(words)


def _define(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return name.strip(), value if equals else "1"


def _constant(text: str) -> tuple[str | int, Any]:
    """A function constant, by name or index, and its value: a number, true or false, or a tuple of such."""
    name, equals, value = text.partition("=")
    try:
        words = re.sub(r"\b(true|false)\b", lambda word: word[0].title(), value.strip())
        read = ast.literal_eval(words if equals else "True")
    except (ValueError, SyntaxError):
        raise UsageError(f"-C takes NAME=VALUE, the value a number, true or false, not {text!r}.") from None
    name = name.strip()
    return int(name) if name.isdecimal() else name, read


def _as_source(cell: str) -> str:
    # The magic line is the cell's first: messages count it, as the notebook's line numbers do.
    return "\n" + cell


def load(shell: Any) -> None:
    """Register the magics with an IPython shell."""
    shell.register_magics(MetalMagics)
