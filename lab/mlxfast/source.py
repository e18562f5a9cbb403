"""A generated kernel as a program: MLX's headers before it, every line under the name its author knows."""

from __future__ import annotations

import functools
import importlib.metadata
import pickle
from pathlib import Path

import mlx.core as mx

from .. import cache
from ..engines import registry
from ..engines.protocol import Executable
from ..errors import EngineError
from ..source import compiler, toolchain
from ..source.program import Options, Program, read
from .signature import Generated

_UTILITIES = "mlx/backend/metal/kernels/utils.h"  # what MLX puts before every custom kernel


def include_folder() -> Path:
    """Where the installed MLX keeps its Metal headers. Raises EngineError for an MLX without them."""
    folder = Path(mx.__file__).parent / "include"
    if not (folder / _UTILITIES).is_file():
        raise EngineError(f"The installed MLX comes without its Metal headers ({folder / _UTILITIES}).")
    return folder


@functools.lru_cache(maxsize=512)
def executable(called: str, generated: Generated, header: str, math: str) -> Executable:
    """The machine code of ``generated``, a kernel called ``called`` with this header.

    Raises CompileError, which tells the line of the ``called`` source or header.
    """
    defines = {"__FAST_MATH__": "1"} if math == "fast" else {}
    options = Options(defines, (include_folder(),), math)
    program = _program(_text(called, generated, header), options, f"kernel {called}")
    return registry.engine("auto").compile(program, program.kernels[generated.name])


def _program(text: str, options: Options, label: str) -> Program:
    """``text`` read, or as it was read before: reading MLX's headers takes longer than most kernels run."""
    if '#include "' in text.replace('#include "mlx/', ""):
        return read(text, None, options, label)  # a file that may change
    headers = (str(include_folder()), compiler.headers_key(), toolchain.version())
    name = cache.key("program", *_reader(), *headers, options.math, label, text) + ".program"
    kept = cache.shared().get(name)
    if kept is not None:
        return pickle.loads(kept)
    program = read(text, None, options, label)
    cache.shared().put(name, pickle.dumps(program))
    return program


@functools.cache
def _reader() -> tuple[bytes, str]:
    """What reads sources, and MLX's version: with another, the program may be another."""
    modules = sorted(Path(compiler.__file__).parent.glob("*.py"))
    return b"".join(p.read_bytes() for p in modules), importlib.metadata.version("mlx")


def _text(called: str, generated: Generated, header: str) -> str:
    """The text with line directives: messages are about the user's own lines, or none."""
    before = f'#include "{_UTILITIES}"\n'
    head = generated.head
    if header:
        # The last line of a header may go on into the signature, as it does on a Mac.
        end = head.index("\n", len(header.rstrip("\n"))) + 1
        before += f'# 1 "{_quoted(called)} header"\n{head[:end]}'
        head = head[end:]
    source = f'# 1 "{_quoted(called)} source"\n{generated.source}'
    return f'{before}\n# 1 "<kernel>"\n{head}{source}\n# 1 "<kernel>"{generated.tail}'


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace(":", " ").replace("\n", " ")
