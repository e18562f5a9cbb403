"""What a Metal source declares, as data: kernels, their parameters, structs."""

from __future__ import annotations

from dataclasses import dataclass, field

from .tokens import Token

# Thread attributes by name: how many components they have (1: a scalar only).
THREAD_ATTRIBUTES = {
    "thread_position_in_grid": 3,
    "thread_position_in_threadgroup": 3,
    "threadgroup_position_in_grid": 3,
    "threads_per_grid": 3,
    "threads_per_threadgroup": 3,
    "dispatch_threads_per_threadgroup": 3,
    "threadgroups_per_grid": 3,
    "grid_origin": 3,
    "grid_size": 3,
    "thread_index_in_threadgroup": 1,
    "thread_index_in_simdgroup": 1,
    "thread_index_in_quadgroup": 1,
    "threads_per_simdgroup": 1,
    "thread_execution_width": 1,
    "simdgroup_index_in_threadgroup": 1,
    "simdgroups_per_threadgroup": 1,
    "dispatch_simdgroups_per_threadgroup": 1,
    "quadgroup_index_in_threadgroup": 1,
    "quadgroups_per_threadgroup": 1,
    "dispatch_quadgroups_per_threadgroup": 1,
}

ADDRESS_SPACES = frozenset({"device", "constant", "threadgroup", "thread"})
SPECIFIERS = frozenset({"static", "constexpr", "const", "inline", "extern", "volatile"})
OUT_OF_SCOPE = frozenset({"texture", "sampler", "stage_in", "imageblock", "raytracing", "payload"})
SCALAR_TYPES = frozenset(
    {"bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "float", "size_t"}
    | {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter.

    ``role`` is ``buffer`` (``index`` is its buffer index), ``threadgroup`` (a ``[[threadgroup(n)]]``
    argument), ``thread`` (an attribute such as thread_position_in_grid, named in ``attribute``),
    ``unsupported`` (textures and the like), ``absent`` (its function constant is not set) or ``unknown``.
    ``type`` is the declared type as written; ``present_at`` is where the name of its function
    constant stands.
    ``index_at`` is where in the text an index stands that is no plain number, such as an enumerator: the
    compiler has to say what it is.
    """

    name: str
    type: str
    role: str
    attribute: str
    index: int | None
    token: Token
    index_at: tuple[int, int] | None = None
    present_at: tuple[int, int] | None = None


@dataclass(frozen=True)
class KernelDeclaration:
    """A kernel that can be dispatched: its host name, the C++ expression that names it, its parameters.

    ``token`` is its name in the source; ``first`` and ``last`` are the tokens its definition spans.
    """

    name: str
    expression: str
    parameters: tuple[Parameter, ...]
    token: Token
    first: Token
    last: Token


@dataclass(frozen=True)
class StructDeclaration:
    """A struct at namespace scope and the names of its plain data members, in order."""

    name: str
    qualified: str
    fields: tuple[str, ...]
    words: frozenset[str]
    """Every name its body uses, so that structs within it can be followed."""


@dataclass(frozen=True)
class Edit:
    """Replace the characters ``[start, end)`` of the scanned text."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class FunctionConstant:
    """``constant T x [[function_constant(n)]];``, or a constant made from such ones by an initialiser.

    ``type`` is T as written, without specifiers. ``index_at`` is where n stands in the text, None for a
    constant made from others: then ``uses`` are names in its initialiser, and ``edits`` what makes it an
    ordinary constant. The declaration spans the characters ``[start, end)``.
    """

    name: str
    qualified: str
    type: str
    token: Token
    start: int
    end: int
    index_at: tuple[int, int] | None = None
    uses: frozenset[str] = frozenset()
    edits: tuple[Edit, ...] = ()


@dataclass
class Declarations:
    """All that the scanner found, and the edits that turn the text into what the compiler takes."""

    kernels: list[KernelDeclaration] = field(default_factory=list)
    structs: dict[str, StructDeclaration] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    out_of_scope: list[tuple[Token, str]] = field(default_factory=list)
    refused: list[tuple[Token, str]] = field(default_factory=list)
    """What Metal refuses and the compiler would not, with the message."""
    function_constants: dict[str, FunctionConstant] = field(default_factory=dict)
    asked: list[tuple[int, int, str]] = field(default_factory=list)
    """Each ``is_function_constant_defined(x)``: where it stands, and x."""
    beyond: dict[str, tuple[Token, str]] = field(default_factory=dict)
    """Kernels by name that use what is out of scope, and what that is: they are no part of the text."""
    second: list[Edit] = field(default_factory=list)
    """Edits for a second attempt, where the compiler refuses what Metal may take: methods for objects of a
    thread, constant references to numbers, offsets of a class added to pointers."""
    third: list[Edit] = field(default_factory=list)
    """Edits for a third: constant references to anything."""
    functions: dict[str, set[str]] = field(default_factory=dict)
    """Every name used in the bodies of the functions of one name: an over-approximate call graph.
    All operators are under ``operator``."""
