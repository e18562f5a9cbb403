"""Which blocks belong to the loops of the source, besides those of the natural loops.

A block that is followed by ``break`` or ``return`` lies outside of the natural loop: no path leads back from
it. Debug information tells that it stands in the loop in the source, for clang notes a loop's first and last
position at its back edges. Without debug information a block is taken to lie in the loop if it stands between
the header and the last back edge in the text of the IR, which at -O0 is in the order of the source; that
misses the end of a body that goes on only by ``continue``. Optimised IR has lost some of this either way.
"""

from __future__ import annotations

from typing import NamedTuple

from .cfg import Belongs
from .instructions import Phi
from .module import Function, MetadataReference, Module

__all__ = ["loops_of_source"]


def loops_of_source(module: Module, function: Function) -> Belongs:
    """For ``ControlFlow.of``: does a block lie in a loop of the source though not in its natural body?"""
    layout = {block.label: index for index, block in enumerate(function.blocks)}
    # A phi that replaces a variable has the place of some assignment to it, which may lie anywhere.
    places = {
        block.label: next(
            filter(None, (_places(module, i.debug) for i in block.instructions if not isinstance(i, Phi))), ()
        )
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
