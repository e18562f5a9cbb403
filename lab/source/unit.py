"""The C++ for OpenCL that the compiler gets: the user's text with its edits, and what we generate around it.

A unit either describes all kernels (``describing``) or runs one of them (``running``). Nothing of the
user's that is not used is compiled: every function of theirs is given internal linkage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from . import constants
from .declarations import Declarations, Edit, KernelDeclaration, StructDeclaration
from .diagnostics import Place
from .preprocess import Preprocessed

_OPEN = (
    "#pragma clang attribute push(__attribute__((internal_linkage)), "
    "apply_to = any(function, variable(is_global)))\n"
)
_CLOSE = "\n#pragma clang attribute pop\n"

_THREADS = "launch.size[0] * launch.size[1] * launch.size[2]"

# Each thread attribute in terms of what the wrappers below have at hand.
_ATTRIBUTES = {
    "thread_position_in_grid": "gx * launch.size[0] + x, gy * launch.size[1] + y, gz * launch.size[2] + z",
    "thread_position_in_threadgroup": "x, y, z",
    "threadgroup_position_in_grid": "gx, gy, gz",
    "threads_per_grid": "launch.grid[0], launch.grid[1], launch.grid[2]",
    "threads_per_threadgroup": "sx, sy, sz",
    "dispatch_threads_per_threadgroup": "launch.size[0], launch.size[1], launch.size[2]",
    "threadgroups_per_grid": "launch.groups[0], launch.groups[1], launch.groups[2]",
    "grid_origin": "0, 0, 0",
    "grid_size": "launch.grid[0], launch.grid[1], launch.grid[2]",
    "thread_index_in_threadgroup": "tid, 0, 0",
    "thread_index_in_simdgroup": "tid & 31u, 0, 0",
    "thread_index_in_quadgroup": "tid & 3u, 0, 0",
    "threads_per_simdgroup": "32u, 0, 0",
    "thread_execution_width": "32u, 0, 0",
    "simdgroup_index_in_threadgroup": "tid >> 5, 0, 0",
    "simdgroups_per_threadgroup": "(sx * sy * sz + 31u) >> 5, 0, 0",
    "dispatch_simdgroups_per_threadgroup": f"({_THREADS} + 31u) >> 5, 0, 0",
    "quadgroup_index_in_threadgroup": "tid >> 2, 0, 0",
    "quadgroups_per_threadgroup": "(sx * sy * sz + 3u) >> 2, 0, 0",
    "dispatch_quadgroups_per_threadgroup": f"({_THREADS} + 3u) >> 2, 0, 0",
}

_THREAD = """
extern "C" void msl_thread(const msl_group* group, uint tid) {{
    const msl_launch& launch = *group->launch;
    const uint gx = group->position[0], gy = group->position[1], gz = group->position[2];
    const uint sx = group->size[0], sy = group->size[1], sz = group->size[2];
    const uint x = tid % sx, y = tid / sx % sy, z = tid / (sx * sy);
    (void)gx, (void)gy, (void)gz, (void)sz, (void)x, (void)y, (void)z;
    typedef msl_signature<decltype({kernel})> signature;
    {bindings}
    {kernel}({arguments});
}}
"""

# Threads of a group one after the other: for kernels in which they never meet.
_GROUPS = """
extern "C" void msl_groups(const msl_launch* record, ulong first, ulong count, volatile ulong* progress) {{
    const msl_launch launch = *record;
    typedef msl_signature<decltype({kernel})> signature;
    {bindings}
    for (ulong index = first; index < first + count; ++index) {{
        *progress = index;
        const uint gx = (uint)(index % launch.groups[0]);
        const uint gy = (uint)(index / launch.groups[0] % launch.groups[1]);
        const uint gz = (uint)(index / ((ulong)launch.groups[0] * launch.groups[1]));
        const uint sx = msl_extent(launch.grid[0] - gx * launch.size[0], launch.size[0]);
        const uint sy = msl_extent(launch.grid[1] - gy * launch.size[1], launch.size[1]);
        const uint sz = msl_extent(launch.grid[2] - gz * launch.size[2], launch.size[2]);
        for (uint z = 0; z < sz; ++z)
            for (uint y = 0; y < sy; ++y)
                for (uint x = 0; x < sx; ++x) {{
                    const uint tid = x + sx * (y + sy * z);
                    (void)tid;
                    {kernel}({arguments});
                }}
    }}
}}
"""


@dataclass(frozen=True)
class Unit:
    """Text for the compiler, with a way back from its positions to the user's."""

    text: str
    preprocessed: Preprocessed
    pieces: tuple[tuple[int, int, int], ...]
    """Copied stretches: offset in ``text``, offset in the preprocessed text, length; in order."""
    tail: int
    """Offset in ``text`` from where on all is ours but for copied stretches."""
    undefined: tuple[str, ...] = ()
    """What to say for each function constant where code uses it; empty for those that have a value."""

    def locate(self, line: int, column: int) -> Place | None:
        """The user's place for a position (from 1) in ``text``; None in what we generated."""
        starts = _line_starts(self.text)
        if not 1 <= line <= len(starts):
            return None
        offset = starts[line - 1] + column - 1
        i = bisect_right(self.pieces, (offset, 1 << 62, 0)) - 1
        if i < 0:
            return None
        ours, theirs, length = self.pieces[i]
        if offset >= self.tail and offset > ours + length:
            return None
        back = theirs + min(offset - ours, length)
        original = self.preprocessed.text
        row = original.count("\n", 0, back) + 1
        return self.preprocessed.origin(row, back - (original.rfind("\n", 0, back) + 1) + 1)


def describing(
    preprocessed: Preprocessed,
    found: Declarations,
    structs: Sequence[StructDeclaration],
    values: Mapping[str, str] | None = None,
) -> Unit:
    """The unit that compiles nothing and describes the parameters of every kernel, and ``structs``.

    ``values`` are those of function constants, as expressions.
    """
    tail = []
    for i, constant in enumerate(found.function_constants.values()):
        if constants.tested(constant):
            known = f"__builtin_constant_p({constant.qualified}__msl)"
            tail.append(f'extern "C" const __constant uint msl_known_{i}[] = {{{known} ? 1u : 0u}};')
    for i, struct in enumerate(structs):
        tail.append(f"template <> struct msl_struct_id<{struct.qualified}> {{ enum {{ value = {i} }}; }};")
    for i, struct in enumerate(structs):
        name = struct.qualified
        fields = "".join(
            f", __builtin_offsetof({name}, {field}), MSL_FIELD(decltype({name}::{field}))"
            for field in struct.fields
        )
        tail.append(f'extern "C" const __constant uint msl_struct_{i}[] = {{sizeof({name}){fields}}};')
    for i, kernel in enumerate(found.kernels):
        described = ", ".join(
            f"MSL_DESCRIBE(msl_signature<decltype({kernel.expression})>::argument<{n}>)"
            for n, p in enumerate(kernel.parameters)
            if p.role in ("buffer", "threadgroup")
        )
        tail.append(f'extern "C" const __constant uint msl_kernel_{i}[] = {{{described or 0}}};')
    instances = [f"(void)&{kernel.expression};" for kernel in found.kernels if "<" in kernel.expression]
    if instances:  # so that an error in a template is found now; nothing calls this, so no code is made
        tail.append(f"inline void msl_unit_instances() {{ {' '.join(instances)} }}")
    parts: list[str | tuple[int, int]] = ["\n".join(tail)]
    for i, kernel in enumerate(found.kernels):
        indices = [p.index_at for p in kernel.parameters if p.index_at is not None]
        parts += _in_its_namespaces(kernel, f"msl_index_{i}", indices, ("(uint)(", "), "))
    for i, kernel in enumerate(found.kernels):
        flags = [p.present_at for p in kernel.parameters if p.present_at is not None]
        around = ("__builtin_constant_p(", ") ? (", ") ? 1u : 0u : 2u, ")
        parts += _in_its_namespaces(kernel, f"msl_present_{i}", flags, around)
    for i, constant in enumerate(found.function_constants.values()):
        if constant.index_at is not None:
            table = f'\nextern "C" const __constant uint msl_number_{i}[]'
            parts += [f"{table} = {{(uint)(", constant.index_at, ")};"]
    return _assemble(preprocessed, [*found.edits, *constants.edits(found, values or {})], parts)


def running(
    preprocessed: Preprocessed,
    found: Declarations,
    kernel: KernelDeclaration,
    *,
    groups: bool,
    values: Mapping[str, str] | None = None,
    unknown: Mapping[str, str] | None = None,
) -> Unit:
    """The unit that runs ``kernel``: by whole threadgroups, or one thread at a time.

    ``values`` are those of function constants, as expressions; ``unknown`` is what to say where code uses one
    that has none.
    """
    bindings, arguments = [], []
    launch = "record->" if groups else "launch."
    for n, p in enumerate(kernel.parameters):
        argument = f"signature::argument<{n}>"
        if p.role == "absent":
            arguments.append(f"msl_absent<{argument}>::get()")
        elif p.role == "buffer":
            bindings.append(f"msl_bind<{argument}> a{n}({launch}buffer[{p.index}]);")
            arguments.append(f"a{n}.get()")
        elif p.role == "threadgroup":
            address = f"group->threadgroup_memory + msl_threadgroup_offset(launch, {p.index})"
            bindings.append(f"msl_bind<{argument}> a{n}({address});")
            arguments.append(f"a{n}.get()")
        else:
            arguments.append(f"msl_attribute<{argument}>::make({_ATTRIBUTES[p.attribute]})")
    template = _GROUPS if groups else _THREAD
    text = template.format(
        kernel=kernel.expression, bindings=" ".join(bindings), arguments=", ".join(arguments)
    )
    unknown = unknown or {}
    given = constants.edits(found, values or {}, tuple(unknown))
    unit = _assemble(preprocessed, [*found.edits, *given], [text])
    return replace(unit, undefined=tuple(unknown.get(name, "") for name in found.function_constants))


def _in_its_namespaces(
    kernel: KernelDeclaration, name: str, places: Sequence[tuple[int, int]], around: tuple[str, ...]
) -> list[str | tuple[int, int]]:
    """A table ``name`` of expressions that stand at ``places`` of the text, as ``kernel`` understands them.

    Each is copied between every two of ``around``.
    """
    if not places:
        return []
    spaces = [n for n in kernel.expression.split("<")[0].split("::")[:-1] if n]
    parts: list[str | tuple[int, int]] = ["\n" + "".join(f"namespace {space} {{ " for space in spaces)]
    parts.append(f'extern "C" const __constant uint {name}[] = {{')
    for at in places:
        parts.append(around[0])
        for piece in around[1:]:
            parts += [at, piece]
    parts.append("};" + " }" * len(spaces))
    return parts


def _assemble(
    preprocessed: Preprocessed, edits: Iterable[Edit], tail: Sequence[str | tuple[int, int]]
) -> Unit:
    """The user's text with its edits, then ``tail``: our own text, and stretches copied from the user's."""
    text = preprocessed.text
    out, pieces = [_OPEN], []
    length, at = len(_OPEN), 0
    for edit in sorted(edits, key=lambda e: (e.start, e.end)):
        if edit.start < at:
            continue  # inside something already replaced
        pieces.append((length, at, edit.start - at))
        out += [text[at : edit.start], edit.text]
        length += edit.start - at + len(edit.text)
        at = edit.end
    pieces.append((length, at, len(text) - at))
    out += [text[at:], _CLOSE]
    length += len(text) - at
    start = length + 1
    length += len(_CLOSE)
    for part in tail:
        if isinstance(part, tuple):
            pieces.append((length, part[0], part[1] - part[0]))
            part = text[slice(*part)]
        out.append(part)
        length += len(part)
    out.append("\n")
    return Unit("".join(out), preprocessed, tuple(pieces), start)


def _line_starts(text: str) -> list[int]:
    starts = [0]
    at = text.find("\n")
    while at >= 0:
        starts.append(at + 1)
        at = text.find("\n", at + 1)
    return starts
