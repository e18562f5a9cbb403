"""From per-thread IR to IR that the fiber executor runs: every meeting told where it stands.

Clang's unoptimised IR, with all calls that lead to a meeting inlined, still has the loops of the source. Here
each loop around a collective gets a counter, and each call of a primitive becomes a call of the runtime with
its site (a constant: the operation, and the path of loops to it) and the counters. Which lanes meet is then
plain data, and the optimiser, which runs after this, may copy and move code as it likes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ... import ir
from ...errors import EngineError

ENTRY = "msl_thread"

_KINDS = (
    "sum", "product", "min", "max", "and", "or", "xor", "prefix_inclusive_sum", "prefix_exclusive_sum",
    "prefix_inclusive_product", "prefix_exclusive_product", "shuffle", "broadcast_first", "ballot", "barrier",
)  # fmt: skip
_TYPES = ("f32", "i32", "u32", "i64", "u64")  # both in the order of the enums of fibers.c
_UNTYPED = {"shuffle": "u32", "broadcast_first": "u32", "ballot": "u64", "barrier": "u32"}
_PRIMITIVE = re.compile(rf"__msl_(simd|quad)_({'|'.join(_KINDS)})(?:_({'|'.join(_TYPES)}))?")

_CALL = re.compile(r"@([\w.$]+)\(")
# The end of a definition's parameters and what has to stand before its attributes.
_INLINED = re.compile(r"\) (?:(?:local_)?unnamed_addr )?(?=[^()]*\{$)")
_DEFINE = re.compile(r"^define [^@]*@([\w.$]+)\(")


@dataclass(frozen=True)
class Site:
    """A call at which threads meet: the primitive's name and the line and column of the unit's text."""

    primitive: str
    line: int
    column: int


@dataclass(frozen=True)
class Lowered:
    """IR for the runtime, the sites that it names by index, and the threadgroup memory declared in it."""

    text: str
    sites: tuple[Site, ...]
    storage: int


def inline_what_meets(text: str) -> str:
    """Mark every function from which a primitive is called to be inlined into its callers."""
    lines = text.split("\n")
    calls: dict[str, set[str]] = {}
    starts: dict[str, int] = {}
    current = ""
    for number, line in enumerate(lines):
        head = _DEFINE.match(line)
        if head:
            current = head[1]
            starts[current] = number
            calls[current] = set()
        elif line == "}":
            current = ""
        elif current and "call " in line:
            calls[current].update(_CALL.findall(line))
    meeting = {name for name, called in calls.items() if any(_is_primitive(c) for c in called)}
    grown = True
    while grown:
        more = {name for name, called in calls.items() if name not in meeting and called & meeting}
        grown = bool(more)
        meeting |= more
    for name in meeting - {ENTRY}:
        line = lines[starts[name]]
        line = line.replace(" noinline ", " ")
        lines[starts[name]] = _INLINED.sub(r"\g<0>alwaysinline ", line, count=1)
    # A group of attributes may hold noinline, which would contradict.
    return "\n".join(re.sub(r"\bnoinline\b ?", "", x) if x.startswith("attributes #") else x for x in lines)


def _is_primitive(name: str) -> bool:
    return name.startswith("__msl_") or name == "msl_threadgroup_block"


def lower(text: str) -> Lowered:
    """Lower a module whose ``msl_thread`` holds all its primitives. Raises EngineError for what can't be."""
    lines = text.split("\n")
    _refuse_elsewhere(lines)
    module = ir.parse(_entry_only(lines))
    function = _split(module.functions[ENTRY])
    primitives = [
        (block, call)
        for block in function.blocks
        for call in block.instructions
        if isinstance(call, ir.Call) and _is_primitive(_called(call))
    ]
    flow = ir.ControlFlow.of(function, ir.loops_of_source(module, function))
    primitives = [(block, call) for block, call in primitives if block.label in flow.successors]
    meetings = [(block, call) for block, call in primitives if _operation(call) is not None]
    if meetings and flow.irreducible:
        raise EngineError("Simdgroup operations in a loop that is entered in its middle are not supported.")
    return _Lowering(lines, module, function, flow).run(primitives)


class _Lowering:
    def __init__(
        self, lines: list[str], module: ir.Module, function: ir.Function, flow: ir.ControlFlow
    ) -> None:
        self.lines = lines
        self.module = module
        self.function = function
        self.flow = flow
        self.group, self.thread = (p.value for p in function.parameters)
        self.slots: dict[ir.Loop, int] = {}
        self.positions: dict[object, int] = {}
        self.places: dict[ir.Call, int] = {}  # primitives in the order of the text
        self.sites: list[Site] = []
        self.globals: list[str] = []
        self.storage: dict[int, int] = {}  # offset of each threadgroup declaration by its id
        self.storage_size = 0
        self.temporaries = 0

    def run(self, primitives: Sequence[tuple[ir.Block, ir.Call]]) -> Lowered:
        self._lay_out_storage(call for _, call in primitives)
        for block, call in primitives:
            if _operation(call) is not None:
                for loop in self.flow.around(block.label):
                    self.slots.setdefault(loop, len(self.slots))
        for region in [None, *(loop.parent for loop in self.slots), *self.slots]:
            self._order(region)
        for place, (block, call) in enumerate(primitives):
            self.places[call] = place
            self._replace(block, call)
        for loop, slot in self.slots.items():
            self._count(loop, slot)
        self._begin()
        text = "\n".join([*self.lines, *self.globals, *_DECLARATIONS, ""])
        return Lowered(text, tuple(self.sites), self.storage_size)

    # -- storage -----------------------------------------------------------------------------------------

    def _lay_out_storage(self, calls: Iterable[ir.Call]) -> None:
        for call in calls:
            if _called(call) == "msl_threadgroup_block":
                identity, size = (_constant(a.value) for a in call.arguments)
                if identity not in self.storage:
                    self.storage[identity] = self.storage_size
                    self.storage_size = _align(self.storage_size + size)

    # -- order -------------------------------------------------------------------------------------------

    def _order(self, region: ir.Loop | None) -> None:
        """Number what stands directly in ``region`` (blocks, and loops as wholes) in program order."""
        if ("done", region) in self.positions:
            return
        self.positions["done", region] = 0
        members = [b for b in self.flow.order if region is None or b in region.blocks]
        nodes = {block: self._child(block, region) for block in members}
        edges: dict[object, set[object]] = {node: set() for node in nodes.values()}
        for block in members:
            for target in self.flow.successors[block]:
                turns = region is not None and target == region.header
                if target in nodes and not turns and nodes[target] is not nodes[block]:
                    edges[nodes[block]].add(nodes[target])
        for position, node in enumerate(_topological(edges)):
            self.positions[region, node] = position

    def _child(self, block: str, region: ir.Loop | None) -> object:
        """The part of ``region`` that ``block`` lies in: itself, or the outermost loop inside the region."""
        around = self.flow.around(block)
        inner = around[0] if region is None and around else None
        if region is not None:
            depth = around.index(region) + 1
            inner = around[depth] if depth < len(around) else None
        return block if inner is None else inner

    # -- calls -------------------------------------------------------------------------------------------

    def _replace(self, block: ir.Block, call: ir.Call) -> None:
        name = _called(call)
        result = "" if call.name is None else f"%{call.name} = "
        if name == "__msl_lane":
            self._put(call, [f"{result}and i32 {self.thread}, 31"])
        elif name == "msl_threadgroup_block":
            offset = self.storage[_constant(call.arguments[0].value)]
            self._put(call, [f"{result}getelementptr i8, ptr %msl.shared, i64 {offset - self.storage_size}"])
        else:
            self._meet(block, call, result)

    def _meet(self, block: ir.Block, call: ir.Call, result: str) -> None:
        operation = _operation(call)
        if operation is None:
            raise EngineError(f"The CPU engine does not know the operation {_called(call)}.")
        path: list[int] = []
        region: ir.Loop | None = None
        around = self.flow.around(block.label)
        for loop in around:
            path += [self.positions[region, loop] << _DIGIT, self.slots[loop]]
            region = loop
        # Calls of one block follow each other: their place in it is the last digit of a position.
        last = self.positions[region, block.label] << _DIGIT | self.places[call]
        index = len(self.sites)
        if index >= _MAX_SITES:
            raise EngineError(f"A kernel has at most {_MAX_SITES} simdgroup operations and barriers.")
        words = [operation, index, len(around), last, *path]
        numbers = ", ".join(f"i32 {w}" for w in words)
        self.globals.append(f"@msl.site.{index} = internal constant [{len(words)} x i32] [{numbers}]")
        where = self.module.location(call)
        while where is not None and where.file != "<stdin>":
            where = where.inlined_at  # the line of the unit, not of a header
        self.sites.append(Site(_called(call), where.line if where else 0, where.column if where else 0))

        text: list[str] = []
        key = f"ptr {self.group}, i64 {self._key(index, around, text)}"
        values = [a.value for a in call.arguments]
        kind = str(call.type)
        match _called(call).removeprefix("__msl_").split("_", 1)[1]:
            case "barrier":
                whole = _called(call) == "__msl_threadgroup_barrier"
                text.append(
                    f"{_CALL_RUNTIME} void @lab_barrier({key})"
                    if whole
                    else f"{self._new()} = {_CALL_RUNTIME} i32 @lab_meet({key}, i32 0)"  # else numbered
                )
            case "shuffle":
                text.append(
                    f"{result}{_CALL_RUNTIME} i32 @lab_shuffle({key}, i32 {values[0]}, i32 {values[1]})"
                )
            case "ballot":
                text.append(f"{self._new()} = zext i32 {values[0]} to i64")
                text.append(f"{result}{_CALL_RUNTIME} i64 @lab_meet64({key}, i64 {self._last()})")
            case _ if kind == "i64":
                text.append(f"{result}{_CALL_RUNTIME} i64 @lab_meet64({key}, i64 {values[0]})")
            case _ if kind == "float":
                text.append(f"{self._new()} = bitcast float {values[0]} to i32")
                text.append(f"{self._new()} = {_CALL_RUNTIME} i32 @lab_meet({key}, i32 {self._last(2)})")
                if result:
                    text.append(f"{result}bitcast i32 {self._last()} to float")
            case _:
                text.append(f"{result}{_CALL_RUNTIME} i32 @lab_meet({key}, i32 {values[0]})")
        self._put(call, text)

    def _key(self, index: int, around: Sequence[ir.Loop], text: list[str]) -> str:
        """The site's index and, above 16 bits, the counters of the loops around it as one number.

        Two meetings of one key are the same. With one loop that is exact up to 2^32 iterations; with more,
        an odd factor keeps the counters apart (in what order meetings are held is decided on each of them).
        """
        if not around:
            return str(index)
        total = ""
        for loop in around:
            text.append(f"{self._new()} = load i32, ptr {self._counter(loop)}, align 4")
            text.append(f"{self._new()} = zext i32 {self._last(2)} to i64")
            if total:
                text.append(f"{self._new()} = mul i64 {total}, {_ODD}")
                text.append(f"{self._new()} = add i64 {self._last(2)}, {self._last(3)}")
            total = self._last()
        text.append(f"{self._new()} = shl i64 {total}, 16")
        text.append(f"{self._new()} = or disjoint i64 {self._last(2)}, {index}")
        return self._last()

    # -- counters ------------------------------------------------------------------------------------------

    def _count(self, loop: ir.Loop, slot: int) -> None:
        """Zero the loop's counter where it is entered, and add one where it turns."""
        for label in self.flow.predecessors[loop.header]:
            block = self.function.block[label]
            text: list[str] = []
            if label not in loop.blocks:
                text.append(f"store i32 0, ptr {self._counter(loop)}, align 4")
            else:
                step = "1"
                targets = block.terminator.successors
                others = [
                    x for x in self.slots if x is not loop and x.header in targets and label in x.latches
                ]
                if others:  # one block turns two loops: count only where this edge is taken
                    branch = block.terminator
                    if not isinstance(branch, ir.ConditionalBranch):
                        raise EngineError("A switch turns two loops at once around a simdgroup operation.")
                    text.append(f"{self._new()} = zext i1 {branch.condition} to i32")
                    step = self._last()
                    if branch.otherwise == loop.header:
                        text.append(f"{self._new()} = xor i32 {step}, 1")
                        step = self._last()
                text.append(f"{self._new()} = load i32, ptr {self._counter(loop)}, align 4")
                text.append(f"{self._new()} = add i32 {self._last(2)}, {step}")
                text.append(f"store i32 {self._last()}, ptr {self._counter(loop)}, align 4")
            at = block.terminator.line - 1
            self.lines[at] = "\n".join([*(f"  {t}" for t in text), self.lines[at]])

    def _counter(self, loop: ir.Loop) -> str:
        return f"%msl.counter.{self.slots[loop]}"

    def _begin(self) -> None:
        """Counters and the threadgroup's memory, at the top of the function."""
        text = []
        if self.slots:
            text.append(f"%msl.counters = alloca [{len(self.slots)} x i32], align 4")
            text += [
                f"%msl.counter.{slot} = getelementptr i8, ptr %msl.counters, i64 {4 * slot}"
                for slot in self.slots.values()
            ]
        if self.sites:
            counters = "%msl.counters" if self.slots else "null"
            arguments = f"ptr {self.group}, ptr {counters}, ptr @msl.sites"
            text.append(f"{_CALL_RUNTIME} void @lab_enter({arguments}){self._anywhere()}")
            listed = ", ".join(f"ptr @msl.site.{i}" for i in range(len(self.sites)))
            self.globals.append(f"@msl.sites = internal constant [{len(self.sites)} x ptr] [{listed}]")
        if self.storage:
            text.append(f"%msl.shared.at = getelementptr i8, ptr {self.group}, i64 8")
            text.append("%msl.shared = load ptr, ptr %msl.shared.at, align 8")
        at = self.function.entry.instructions[0].line - 1
        self.lines[at] = "\n".join([*(f"  {t}" for t in text), self.lines[at]])

    def _anywhere(self) -> str:
        """A place for a call of our own: with debug information, the verifier wants one for each call."""
        known = (i.debug for block in self.function.blocks for i in block.instructions if i.debug is not None)
        number = next(known, None)
        return "" if number is None else f", !dbg !{number}"

    # -- text ------------------------------------------------------------------------------------------------

    def _new(self) -> str:
        self.temporaries += 1
        return f"%msl.{self.temporaries}"

    def _last(self, back: int = 1) -> str:
        return f"%msl.{self.temporaries - back + 1}"

    def _put(self, call: ir.Call, text: Sequence[str]) -> None:
        suffix = f", !dbg !{call.debug}" if call.debug is not None else ""
        self.lines[call.line - 1] = "\n".join(f"  {t}{suffix}" if "call" in t else f"  {t}" for t in text)


# The kernel keeps what it needs in registers across the call: as FROM_KERNEL of fibers.c has it.
_CALL_RUNTIME = "call preserve_nonecc"
_DECLARATIONS = (
    "declare preserve_nonecc void @lab_enter(ptr, ptr, ptr) nounwind",
    "declare preserve_nonecc i32 @lab_meet(ptr, i64, i32) nounwind",
    "declare preserve_nonecc i32 @lab_shuffle(ptr, i64, i32, i32) nounwind",
    "declare preserve_nonecc i64 @lab_meet64(ptr, i64, i64) nounwind",
    "declare preserve_nonecc void @lab_barrier(ptr, i64) nounwind",
)
_MAX_SITES = 1 << 16
_DIGIT = 16  # bits of a position that tell calls of one block apart
_ODD = 0x9E3779B1


def _entry_only(lines: Sequence[str]) -> str:
    """The module's text with every other function blanked, so that lines keep their numbers."""
    kept, inside, wanted = [], False, False
    for line in lines:
        head = _DEFINE.match(line)
        if head:
            inside, wanted = True, head[1] == ENTRY
        drop = inside and not wanted
        kept.append("" if drop else line)
        if line == "}":
            inside = False
    return "\n".join(kept)


def _refuse_elsewhere(lines: Sequence[str]) -> None:
    """Primitives in functions that could not be inlined: those that call themselves."""
    current = ""
    for line in lines:
        head = _DEFINE.match(line)
        if head:
            current = head[1]
        elif line == "}":
            current = ""
        elif current not in ("", ENTRY) and "call " in line and any(map(_is_primitive, _CALL.findall(line))):
            raise EngineError(
                "A function that calls itself, which Metal does not allow, uses barriers, simdgroup "
                "operations or threadgroup memory: write it as a loop."
            )


def _split(function: ir.Function) -> ir.Function:
    """The function with a block of its own for each primitive and what follows it.

    Inlining joins the end of a loop's body with what comes after the loop, so that a call's own place in
    the source, not that of its block, tells which loops it is in. Lines and branches stay as they are.
    """
    blocks = []
    for block in function.blocks:
        label, piece = block.label, list[ir.Instruction]()
        for instruction in block.instructions:
            if piece and isinstance(instruction, ir.Call) and _is_primitive(_called(instruction)):
                following = f"{block.label}@{instruction.line}"
                piece.append(ir.Branch(type=ir.VoidType(), target=following))
                blocks.append(ir.Block(label, tuple(piece)))
                label, piece = following, []
            piece.append(instruction)
        blocks.append(ir.Block(label, tuple(piece)))
    return replace(function, blocks=tuple(blocks))


def _called(call: ir.Call) -> str:
    """Name of the function called; empty where that is a pointer."""
    return call.callee.name if isinstance(call.callee, ir.Global) else ""


def _operation(call: ir.Call) -> int | None:
    """The operation's number for the runtime; None for what is no meeting."""
    name = _called(call)
    if name in ("__msl_threadgroup_barrier", "__msl_simdgroup_barrier"):
        return _KINDS.index("barrier") | _TYPES.index("u32") << 8
    match = _PRIMITIVE.fullmatch(name)
    if match is None:
        return None
    scope, kind, of = match[1], match[2], match[3]
    of = of or _UNTYPED.get(kind, "")
    if of not in _TYPES:
        return None
    return _KINDS.index(kind) | _TYPES.index(of) << 8 | (scope == "quad") << 16


def _constant(value: ir.Value) -> int:
    if not isinstance(value, ir.IntConstant):
        raise EngineError("The size of threadgroup memory is not known when the kernel is compiled.")
    return value.value


def _align(size: int) -> int:
    return -(-size // 16) * 16


def _topological(edges: Mapping[object, set[object]]) -> list[object]:
    """Nodes so that every edge goes forward; among free ones, in the order of ``edges``."""
    incoming = dict.fromkeys(edges, 0)
    for targets in edges.values():
        for target in targets:
            incoming[target] += 1
    ready = [node for node in edges if not incoming[node]]
    order = []
    while ready:
        node = ready.pop(0)
        order.append(node)
        for target in edges[node]:
            incoming[target] -= 1
            if not incoming[target]:
                ready.append(target)
    return order


_DIVISION = re.compile(
    r"^(?P<head>  (?P<result>%[\w.]+) = (?P<op>[su](?:div|rem)) (?:exact )?(?P<type>i\d+|<\d+ x i\d+>)) "
    r"(?P<a>[^,]+), (?P<b>%[\w.]+)(?P<rest>.*)$",
    re.M,
)


def guard_divisions(text: str) -> str:
    """Keep integer division by zero, and of the least number by -1, from stopping the program.

    Metal leaves the result undefined and GPUs go on; so here: the divisor is taken as 1.
    """

    def guarded(match: re.Match[str]) -> str:
        result, of, a, b = match["result"], match["type"], match["a"], match["b"]
        name = f"%msl.div.{result[1:]}"
        condition = f"<{of.split(' ')[0][1:]} x i1>" if of.startswith("<") else "i1"
        bits = int(re.findall(r"i(\d+)", of)[0])
        lines = [f"  {name}.z = icmp eq {of} {b}, {_splat(of, 0)}"]
        bad = f"{name}.z"
        if match["op"].startswith("s"):
            lines += [
                f"  {name}.m = icmp eq {of} {b}, {_splat(of, -1)}",
                f"  {name}.l = icmp eq {of} {a}, {_splat(of, -(1 << bits - 1))}",
                f"  {name}.o = and {condition} {name}.m, {name}.l",
                f"  {name}.b = or {condition} {name}.z, {name}.o",
            ]
            bad = f"{name}.b"
        lines.append(f"  {name}.d = select {condition} {bad}, {of} {_splat(of, 1)}, {of} {b}")
        lines.append(f"{match['head'].replace('exact ', '')} {a}, {name}.d{match['rest']}")
        return "\n".join(lines)

    return _DIVISION.sub(guarded, text)


def _splat(of: str, value: int) -> str:
    if not of.startswith("<"):
        return str(value)
    count, element = of[1:-1].split(" x ")
    return "<" + ", ".join([f"{element} {value}"] * int(count)) + ">"
