"""Who meets whom: the model's reading of the rule for collectives.

The rule: those take part in a collective that reach the same call, in the same iteration of every loop around
it. Lanes that returned, or sit in another branch, do not count.

*Loops.* The loops around a call are those of the source. In the control flow graph a call that is followed by
``break`` or ``return`` lies outside of the natural loop, because no path leads back from it; still lanes that
come to it in different iterations do not meet. So a loop takes in, besides its natural body, the blocks that
its header dominates and that lie in it in the source (``lab.ir.loops_of_source``).

*Instance.* What lanes meet at is an instance of a call of a primitive. It is named by a position: for every
frame of the thread's call stack, from the entry point inwards, the place in the function's code (block and
index in it; for an outer frame that is the call it waits for) and, for each loop around that place,
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

from typing import NamedTuple

from ...ir import ControlFlow

__all__ = ["Place", "Position", "can_reach"]


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
