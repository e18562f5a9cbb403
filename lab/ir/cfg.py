"""Control flow of a function: order, dominators, natural loops, and what can still be reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .module import Function

__all__ = ["Belongs", "ControlFlow", "Loop"]

Belongs = Callable[[str, set[str], str], bool]
"""From a loop's header, its latches and a block: does the block belong to the loop?"""


@dataclass(frozen=True, eq=False)
class Loop:
    """A natural loop: ``body`` holds the blocks from which a back edge to ``header`` is reached inside it.

    ``blocks`` holds besides those the blocks that belong to the loop although they do not lead back, such as
    what stands before a ``break``. Loops compare by identity; two back edges to one header make one loop.
    """

    header: str
    body: frozenset[str]
    blocks: frozenset[str]
    latches: frozenset[str]
    parent: Loop | None
    depth: int

    def __repr__(self) -> str:
        return f"Loop(%{self.header})"


@dataclass(frozen=True, eq=False)
class ControlFlow:
    """The analysis of one function. Blocks are named by label; those that cannot be reached are left out.

    ``order`` is reverse postorder. ``irreducible`` names the blocks at which a cycle is entered other than
    through a header that dominates it; with any, ``loops`` does not describe every cycle.
    """

    successors: Mapping[str, tuple[str, ...]]
    predecessors: Mapping[str, tuple[str, ...]]
    order: tuple[str, ...]
    dominator: Mapping[str, str]
    loops: tuple[Loop, ...]
    irreducible: tuple[str, ...]
    _innermost: Mapping[str, Loop] = field(repr=False)
    _around: dict[str, tuple[Loop, ...]] = field(default_factory=dict, repr=False)
    _reachable: dict[tuple[str, Loop | None], frozenset[str]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, function: Function, belongs: Belongs | None = None) -> ControlFlow:
        """Analyse a function that has a body.

        ``belongs`` says of a block that is dominated by a loop's header, but not in its body, whether it
        belongs to the loop all the same; it gets the header, the latches and the block's label.
        """
        everything = {block.label: block.terminator.successors for block in function.blocks}
        order = _reverse_postorder(function.entry.label, everything)
        successors = {label: everything[label] for label in order}
        reversed_edges: dict[str, list[str]] = {label: [] for label in order}
        for label in order:
            for target in successors[label]:
                reversed_edges[target].append(label)
        predecessors = {label: tuple(sources) for label, sources in reversed_edges.items()}
        dominator = _dominators(order, predecessors)
        index = {label: i for i, label in enumerate(order)}
        latches: dict[str, set[str]] = {}
        irreducible = []
        for label in order:
            for target in successors[label]:
                if index[target] <= index[label]:
                    if _dominates(dominator, target, label):
                        latches.setdefault(target, set()).add(label)
                    else:
                        irreducible.append(target)
        bodies = {header: _body(header, sources, predecessors) for header, sources in latches.items()}
        blocks = dict(bodies)
        if belongs is not None:
            for header, body in bodies.items():
                behind = (b for b in order if b not in body and _dominates(dominator, header, b))
                blocks[header] |= {b for b in behind if belongs(header, latches[header], b)}
            _complete(blocks, successors, predecessors)
        loops = _nest(order, bodies, blocks, latches)
        innermost = {label: loop for loop in loops for label in loop.blocks}  # inner ones come later
        return cls(
            successors, predecessors, order, dominator, loops, tuple(dict.fromkeys(irreducible)), innermost
        )

    def innermost(self, label: str) -> Loop | None:
        """The innermost loop around a block."""
        return self._innermost.get(label)

    def around(self, label: str) -> tuple[Loop, ...]:
        """The loops around a block, outermost first."""
        known = self._around.get(label)
        if known is None:
            loops = []
            loop = self.innermost(label)
            while loop is not None:
                loops.append(loop)
                loop = loop.parent
            known = self._around[label] = tuple(reversed(loops))
        return known

    def dominates(self, above: str, below: str) -> bool:
        """True if every path from the entry to ``below`` passes ``above``; a block dominates itself."""
        return _dominates(self.dominator, above, below)

    def is_back_edge(self, source: str, target: str) -> bool:
        """True for an edge that ends one iteration of the loop with header ``target`` and begins the next."""
        loop = self.innermost(target)
        return loop is not None and loop.header == target and source in loop.latches

    def reachable(self, source: str, within: Loop | None) -> frozenset[str]:
        """Blocks that can follow ``source``, by one edge or more, before the next iteration of ``within``.

        That is by paths that do not come to the header of ``within`` or of a loop around it; loops inside it
        may turn. None stands for the function as a whole.
        """
        known = self._reachable.get((source, within))
        if known is not None:
            return known
        headers, loop = set(), within
        while loop is not None:
            headers.add(loop.header)
            loop = loop.parent
        seen: set[str] = set()
        work = [source]
        while work:
            for target in self.successors[work.pop()]:
                if target not in headers and target not in seen:
                    seen.add(target)
                    work.append(target)
        return self._reachable.setdefault((source, within), frozenset(seen))

    def iterates(self, source: str, loop: Loop) -> bool:
        """True if ``source``, a block of ``loop``, can be followed by the loop's next iteration."""
        return source in loop.latches or not loop.latches.isdisjoint(self.reachable(source, loop))

    def reaches(
        self,
        source: tuple[str, int],
        target: tuple[str, int],
        source_counts: Sequence[int],
        target_counts: Sequence[int],
    ) -> bool:
        """True if after an execution of ``source`` one of ``target`` can still come, by paths in this graph.

        A place is a block and an index into its instructions; the counts say in which iteration, for each of
        ``around(block)``. Every loop is entered at most once in an iteration of the loop around it, so places
        with counts are partially ordered and no place reaches itself.
        """
        (source_block, source_index), (target_block, target_index) = source, target
        common: Loop | None = None
        for loop, other, now, then in zip(
            self.around(source_block), self.around(target_block), source_counts, target_counts, strict=False
        ):
            if loop is not other:
                break
            if now != then:
                # A loop's header reaches each of its blocks, whatever their inner loops' counts.
                return now < then and self.iterates(source_block, loop)
            common = loop
        if source_block == target_block:
            return source_index < target_index
        return target_block in self.reachable(source_block, common)


def _reverse_postorder(entry: str, successors: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    order, seen = [], {entry}
    stack = [(entry, iter(successors[entry]))]
    while stack:
        label, rest = stack[-1]
        target = next((t for t in rest if t not in seen), None)
        if target is None:
            order.append(label)
            stack.pop()
        else:
            seen.add(target)
            stack.append((target, iter(successors[target])))
    return tuple(reversed(order))


def _dominators(order: Sequence[str], predecessors: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Immediate dominators (Cooper, Harvey, Kennedy); the entry is its own."""
    index = {label: i for i, label in enumerate(order)}
    dominator = {order[0]: order[0]}
    changed = True
    while changed:
        changed = False
        for label in order[1:]:
            new: str | None = None
            for source in predecessors[label]:
                if source not in dominator:
                    continue
                if new is None:
                    new = source
                    continue
                other = source
                while new != other:
                    while index[new] > index[other]:
                        new = dominator[new]
                    while index[other] > index[new]:
                        other = dominator[other]
            assert new is not None  # in reverse postorder a predecessor comes first
            if dominator.get(label) != new:
                dominator[label] = new
                changed = True
    return dominator


def _dominates(dominator: Mapping[str, str], above: str, below: str) -> bool:
    while below != above:
        if dominator[below] == below:
            return False
        below = dominator[below]
    return True


def _body(header: str, latches: Iterable[str], predecessors: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """The natural loop of back edges from ``latches`` to ``header``."""
    body = {header}
    work = list(latches)
    while work:
        label = work.pop()
        if label not in body:
            body.add(label)
            work.extend(predecessors[label])
    return frozenset(body)


def _complete(
    blocks: dict[str, frozenset[str]],
    successors: Mapping[str, tuple[str, ...]],
    predecessors: Mapping[str, tuple[str, ...]],
) -> None:
    """Make each loop's blocks hold those of the loops in it, and what lies on a path between two of them."""
    changed = True
    while changed:
        changed = False
        for header, own in blocks.items():
            inner = [other for at, other in blocks.items() if at in own and at != header]
            whole = own.union(*inner)
            whole |= _reach(whole, header, successors) & _reach(whole - {header}, header, predecessors)
            changed |= whole != own
            blocks[header] = whole


def _reach(start: Iterable[str], without: str, edges: Mapping[str, tuple[str, ...]]) -> set[str]:
    """What ``edges`` lead to from ``start``, not through ``without``."""
    seen: set[str] = set()
    work = list(start)
    while work:
        for target in edges[work.pop()]:
            if target != without and target not in seen:
                seen.add(target)
                work.append(target)
    return seen


def _nest(
    order: Sequence[str],
    bodies: Mapping[str, frozenset[str]],
    blocks: Mapping[str, frozenset[str]],
    latches: Mapping[str, set[str]],
) -> tuple[Loop, ...]:
    """The loops, outer before inner."""
    loops: dict[str, Loop] = {}

    def build(header: str) -> Loop:
        if header not in loops:
            around = [other for other in blocks if other != header and header in blocks[other]]
            above = min(around, key=lambda other: len(blocks[other]), default=None)
            parent = None if above is None else build(above)
            depth = 0 if parent is None else parent.depth + 1
            loops[header] = Loop(
                header, bodies[header], blocks[header], frozenset(latches[header]), parent, depth
            )
        return loops[header]

    for header in blocks:
        build(header)
    return tuple(sorted(loops.values(), key=lambda loop: (loop.depth, order.index(loop.header))))
