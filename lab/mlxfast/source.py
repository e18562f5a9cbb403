"""A generated kernel as a program: MLX's headers before it, every line under the name its author knows."""

from __future__ import annotations

import functools
from pathlib import Path

import mlx.core as mx

from ..engines import registry
from ..engines.protocol import Executable
from ..errors import EngineError
from ..source.program import Options, read
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
    program = read(_text(called, generated, header), None, options, f"kernel {called}")
    return registry.engine("auto").compile(program, program.kernels[generated.name])


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
