from __future__ import annotations

import itertools
import random

import pytest

from lab import ir
from tests.ir.snippets import llvm


def graph(edges: dict[str, list[str]]) -> ir.Function:
    """A function whose control flow is ``edges``; a block without any returns."""
    blocks = []
    for label, targets in edges.items():
        if not targets:
            end = "ret void"
        elif len(targets) == 1:
            end = f"br label %{targets[0]}"
        else:
            cases = " ".join(f"i32 {i}, label %{t}" for i, t in enumerate(targets[1:]))
            end = f"switch i32 %x, label %{targets[0]} [ {cases} ]"
        blocks.append(f"{label}:\n  {end}")
    return ir.parse("define void @f(i32 %x) {\n" + "\n".join(blocks) + "\n}").functions["f"]


def random_graph(seed: int, size: int) -> dict[str, list[str]]:
    choose = random.Random(seed)
    labels = [f"b{i}" for i in range(size)]
    edges = {}
    for i, label in enumerate(labels[:-1]):
        ahead = labels[i + 1 : i + 4]
        back = labels[max(1, i - 3) : i + 1] if choose.random() < 0.4 else []
        edges[label] = list(dict.fromkeys(choose.choices(ahead + back, k=choose.choice((1, 2, 2)))))
    edges[labels[-1]] = []
    return edges


def reachable(edges: dict[str, list[str]], source: str, without: str | None = None) -> set[str]:
    seen, work = {source} - {without}, [source]
    while work:
        for target in edges[work.pop()]:
            if target not in seen and target != without:
                seen.add(target)
                work.append(target)
    return seen


@pytest.mark.parametrize("number", range(60))
def test_dominators_are_what_no_path_avoids(number, seed):
    edges = random_graph(seed + number, 9)
    flow = ir.ControlFlow.of(graph(edges))
    everything = reachable(edges, "b0")
    assert set(flow.order) == everything
    for above, below in itertools.product(everything, repeat=2):
        avoided = above != "b0" and below in reachable(edges, "b0", without=above)
        assert flow.dominates(above, below) == (not avoided)


def test_loops_are_nested_and_two_back_edges_make_one():
    flow = ir.ControlFlow.of(
        graph(
            {
                "entry": ["outer"],
                "outer": ["inner", "exit"],
                "inner": ["inner2", "outer_latch"],
                "inner2": ["inner", "inner3"],
                "inner3": ["inner"],
                "outer_latch": ["outer"],
                "exit": [],
            }
        )
    )
    outer, inner = flow.loops
    assert (outer.header, inner.header, inner.parent, inner.depth) == ("outer", "inner", outer, 1)
    assert inner.latches == {"inner2", "inner3"} and inner.body == {"inner", "inner2", "inner3"}
    assert flow.around("inner3") == (outer, inner) and flow.around("exit") == ()
    assert flow.is_back_edge("inner3", "inner") and not flow.is_back_edge("outer", "inner")
    assert not flow.irreducible


def test_a_cycle_with_two_entries_is_irreducible():
    flow = ir.ControlFlow.of(graph({"entry": ["a", "b"], "a": ["b"], "b": ["a", "exit"], "exit": []}))
    assert flow.irreducible


def test_blocks_that_cannot_be_reached_are_left_out():
    flow = ir.ControlFlow.of(graph({"entry": ["exit"], "dead": ["exit"], "exit": []}))
    assert flow.order == ("entry", "exit") and flow.predecessors["exit"] == ("entry",)


def states(flow: ir.ControlFlow, most: int):
    """For each position (block and counts of the loops around it) the positions that can follow it, by brute
    force: a walk that counts every loop as it goes, cut where a count exceeds ``most``."""
    loops = flow.loops
    numbers = {loop.header: i for i, loop in enumerate(loops)}

    def seen(block: str, counts: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        return block, tuple(counts[loops.index(loop)] for loop in flow.around(block))

    def follow(block: str, counts: tuple[int, ...]):
        for target in flow.successors[block]:
            after = list(counts)
            if target in numbers:
                number = numbers[target]
                after[number] = after[number] + 1 if block in loops[number].latches else 0
            if max(after, default=0) <= most:
                yield target, tuple(after)

    start = flow.order[0], (0,) * len(loops)
    everything, work = {start}, [start]
    while work:
        for state in follow(*work.pop()):
            if state not in everything:
                everything.add(state)
                work.append(state)
    after: dict[object, set[object]] = {}
    for state in everything:
        reached, work = set(), [state]
        while work:
            for other in follow(*work.pop()):
                if other not in reached:
                    reached.add(other)
                    work.append(other)
        after.setdefault(seen(*state), set()).update(seen(*other) for other in reached)
    return after


@pytest.mark.parametrize("number", range(40))
def test_reaching_an_iteration_is_what_a_walk_with_counters_finds(number, seed):
    flow = None
    while flow is None or flow.irreducible or not 1 <= len(flow.loops) <= 3:
        seed += 1009
        flow = ir.ControlFlow.of(graph(random_graph(seed + number, 8)))
    after = states(flow, most=3)
    # Counts at the limit are cut off in the walk, so only smaller ones are compared.
    positions = [p for p in after if max(p[1], default=0) < 2]
    for source, target in itertools.product(positions, repeat=2):
        found = flow.reaches((source[0], 0), (target[0], 0), source[1], target[1])
        assert found == (target in after[source]), (source, target)


@pytest.mark.parametrize("number", range(40))
def test_reaching_has_no_cycles(number, seed):
    flow = ir.ControlFlow.of(graph(random_graph(seed + number, 10)))
    if flow.irreducible:
        return
    places = [
        (block, counts)
        for block in flow.order
        for counts in itertools.product(range(2), repeat=len(flow.around(block)))
    ]
    for (a, m), (b, n) in itertools.product(places, repeat=2):
        assert not (flow.reaches((a, 0), (b, 0), m, n) and flow.reaches((b, 0), (a, 0), n, m))


LEAVING = """
extern "C" void f(device int* p) {
  while (true) {
    if (p[0]) { p[1] = 1; continue; }
    if (p[2]) { p[3] = 1; break; }
    if (p[4]) { p[5] = 1; return; }
    p[6] = 1;
    break;
  }
  p[7] = 1;
}
"""


@pytest.mark.parametrize(
    ("flags", "inside"), [(("-O0", "-g"), "1356"), (("-O0", "-gline-tables-only"), "1356")]
)
def test_what_leads_out_of_a_loop_of_the_source_belongs_to_it(flags, inside):
    module = ir.parse(llvm(LEAVING, *flags))
    f = module.functions["f"]
    (natural,) = ir.ControlFlow.of(f).loops
    (loop,) = ir.ControlFlow.of(f, ir.loops_of_source(module, f)).loops
    assert natural.blocks == natural.body == loop.body

    def stored(labels: frozenset[str]) -> str:
        """Indices of ``p`` that the blocks write."""
        found = []
        for label in labels:
            instructions = f.block[label].instructions
            for before, instruction in itertools.pairwise(instructions):
                if isinstance(instruction, ir.Store) and isinstance(before, ir.GetElementPtr):
                    found.append(str(before.indices[-1]))
        return "".join(sorted(found))

    assert stored(natural.blocks) == "1"
    assert stored(loop.blocks) == "1356"
