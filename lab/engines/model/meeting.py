"""Who meets whom: the model's reading of the rule for collectives.

The rule: those take part in a collective that reach the same call, in the same iteration of every loop around
it. Lanes that returned, or sit in another branch, do not count.

*Loops.* The loops around a call are those of the source. In the control flow graph a call that is followed by
``break`` or ``return`` lies outside of the natural loop, because no path leads back from it; still lanes that
come to it in different iterations do not meet. So a loop takes in, besides its natural body, the blocks that
its header dominates and that lie in it in the source. Debug information tells that: clang notes a loop's
first and last position at its back edges. Without it a block lies in the loop if it stands between the header
and the last back edge in the text of the IR, which at -O0 is in the order of the source; that misses the end
of a body which only goes on by ``continue``.

*Instance.* What lanes meet at is an instance of a call of a primitive. It is named by a position: for every
frame of the thread's call stack, from the entry point inwards, the place in the function's code (block and
index in it; for an outer frame that is the call it waits for) and, for each natural loop around that place,
how many times the loop's back edges were taken since it was entered. Two lanes are at the same instance
exactly if their positions are equal. So a helper called from two places has two instances, and so have two
iterations, or two rounds of an outer loop. Control flow is reducible (anything else is refused where
primitives are called), hence in one iteration of a loop each loop directly inside it is entered at most once,
and a lane comes to an instance at most once.

*Reach.* A lane that stands at position p can still come to instance q if, at the first frame where the two
differ, the place of q can follow the place of p on a path of the control flow graph that fits the counts: the
outermost common loop whose counts differ must have turned fewer times for p than for q, and p must be able to
go round it; if none differs, q must follow p within the current iteration of the innermost loop common to
both. Conditions of branches are not looked at: any path counts. Between equal frames nothing is compared, and
a called function is taken to return. This relation has no cycles: p reaching q excludes q reaching p, because
each step forwards either goes down the acyclic body of an iteration or increases a count.

*Release.* An instance is released when no lane of its scope (simdgroup, or quad) other than those waiting at
it can still reach it, whether that lane runs, or waits elsewhere. Those who wait at it then take part; all
others cannot come any more, so the set is exactly the set of lanes that reach the instance, whatever the
order in which lanes are run and instances released. No instance is ever ambiguous, and among lanes that all
wait at collectives one can always be released, because reach has no cycles.

*Barriers.* A threadgroup barrier is an instance too, and waits for every thread of the group that has not
returned. The only way to be stuck is therefore a barrier: some wait at it, others at another instance that
the first could still reach (so that it is not released) or at another barrier. That is a BarrierError. A
simdgroup barrier is met by the lanes that reach it, like a collective; if others of the simdgroup have not
returned, that is reported, and no error: Metal forbids it, but there it harms nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...ir import ControlFlow, Function, MetadataReference, Module

__all__ = ["Place", "Position", "can_reach", "loops_of_source"]


class Place(NamedTuple):
    """Where one frame stands: in ``block`` the index ``at`` of the instruction begun last (-1: none yet),
    and for every loop around the block its count."""

    flow: ControlFlow | None
    """None for a function in which no primitive can be called; no position is compared there."""
    block: str
    at: int
    counts: tuple[int, ...]


Position = tuple[Place, ...]
"""Where a thread stands: a place for every frame, the entry point's first."""


def can_reach(position: Position, instance: Position) -> bool:
    """True if a thread at ``position`` can still come to ``instance``, by paths of the control flow graph."""
    for here, there in zip(position, instance, strict=False):
        if here == there:
            continue
        if here.flow is None or here.flow is not there.flow:
            return False  # one call of an address, which for the other was another function
        return here.flow.reaches((here.block, here.at), (there.block, there.at), here.counts, there.counts)
    return False


def loops_of_source(module: Module, function: Function) -> Callable[[str, set[str], str], bool]:
    """Whether a block lies in a loop of the source though not in its natural body; see above."""
    layout = {block.label: index for index, block in enumerate(function.blocks)}
    places = {
        block.label: next(filter(None, (_places(module, i.debug) for i in block.instructions)), ())
        for block in function.blocks
    }
    extents = {
        block.label: _extent(module, dict(block.terminator.metadata).get("llvm.loop"))
        for block in function.blocks
    }

    def belongs(header: str, latches: set[str], label: str) -> bool:
        extent = next(filter(None, (extents[latch] for latch in latches)), None)
        if extent is not None:
            first, last = extent
            inside = (place for place in places[label] if place.inlined == first.inlined)
            return any(p.file == first.file and first.position <= p.position <= last.position for p in inside)
        return layout[header] < layout[label] <= max(layout[latch] for latch in latches)

    return belongs


class _Source(NamedTuple):
    """A place in the source; ``inlined`` is the node of the call at which it was inlined."""

    inlined: int | None
    file: str
    position: tuple[int, int]


def _places(module: Module, number: int | None) -> tuple[_Source, ...]:
    """Where an instruction lies in the source, then where the function it is in was inlined, and so on.

    Empty if that is not known, as for code that belongs to no line.
    """
    places: list[_Source] = []
    while number is not None:
        node, location = module.metadata.get(number), module.location_of(number)
        if node is None or location is None or not location.line:
            return ()
        outer = node.fields.get("inlinedAt")
        number = outer.number if isinstance(outer, MetadataReference) else None
        places.append(_Source(number, location.file, (location.line, location.column)))
    return tuple(places)


def _extent(module: Module, number: int | None) -> tuple[_Source, _Source] | None:
    """First and last place of a loop, as the metadata of its back edge says."""
    node = None if number is None else module.metadata.get(number)
    if node is None:
        return None
    numbers = [operand.number for operand in node.operands if isinstance(operand, MetadataReference)]
    found = [places[0] for places in (_places(module, n) for n in numbers) if places]
    return (found[0], found[1]) if len(found) >= 2 else None
