"""Random programs with divergent control flow around collectives, and what they must compute.

A program is generated as a tree, rendered as C++, and executed here by the textbook's masks: the lanes of a
simdgroup go through the tree together, an ``if`` splits them, a loop holds those that have not left it. That
is the rule for collectives on structured programs, and it knows nothing of control flow graphs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

LANES = 32
WORD = 0xFFFFFFFF


@dataclass
class Lanes:
    """State of one function's activation: a variable ``x`` per lane."""

    x: list[int]
    returned: set[int] = field(default_factory=set)
    broken: list[set[int]] = field(default_factory=list)
    continued: list[set[int]] = field(default_factory=list)

    def running(self, mask: set[int]) -> set[int]:
        left = self.returned.union(*self.broken[-1:], *self.continued[-1:])
        return mask - left


Statement = tuple[str, Callable[[Lanes, set[int]], None]]
"""Text of C++, and execution by the lanes of a set, which is not empty."""


class Generator:
    """One random program. ``source`` is its functions; ``run`` gives ``x`` of each lane at the end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names = 0
        self.depth = 0
        self.helpers: list[tuple[str, Statement]] = []
        for number in range(self.random.randrange(3)):
            self.helpers.append((f"h{number}", self.body(2, 0, in_loop=False)))
        self.main = self.body(4, 0, in_loop=False)

    @property
    def source(self) -> str:
        functions = [
            f"static uint {name}(uint x) {{\n{text}\nreturn x;\n}}" for name, (text, _) in self.helpers
        ]
        return "\n".join([*functions, f"static uint program(uint x) {{\n{self.main[0]}\nreturn x;\n}}"])

    def run(self, x: list[int]) -> list[int]:
        state = Lanes(list(x))
        self.main[1](state, set(range(len(x))))
        return state.x

    def name(self) -> str:
        self.names += 1
        return f"v{self.names}"

    def body(self, size: int, depth: int, *, in_loop: bool) -> Statement:
        count = self.random.randrange(1, size + 1)
        parts = [self.statement(depth, in_loop=in_loop) for _ in range(count)]

        def execute(state: Lanes, mask: set[int]) -> None:
            for _, part in parts:
                mask = state.running(mask)
                if mask:
                    part(state, mask)

        return "\n".join(text for text, _ in parts), execute

    def statement(self, depth: int, *, in_loop: bool) -> Statement:
        choices = [self.compute, self.collective, self.collective]
        if depth < 4:
            choices += [self.branch, self.branch, self.counted, self.repeated, self.retried, self.switch]
        if self.helpers:
            choices.append(self.call)
        kind = self.random.choice(choices)
        if kind in (self.compute, self.collective, self.call):
            return kind()  # type: ignore[call-arg]
        return kind(depth, in_loop=in_loop)  # type: ignore[call-arg]

    def compute(self) -> Statement:
        a, b = self.random.randrange(3, 1 << 16) | 1, self.random.randrange(1 << 16)

        def execute(state: Lanes, mask: set[int]) -> None:
            for lane in mask:
                state.x[lane] = (state.x[lane] * a + b) & WORD
                state.x[lane] ^= state.x[lane] >> 7

        return f"x = x * {a}u + {b}u; x ^= x >> 7;", execute

    def collective(self) -> Statement:
        kind = self.random.choice(("ballot", "sum", "prefix", "first", "quad"))
        text = {
            "ballot": "(uint)__msl_simd_ballot(x & 4u)",
            "sum": "__msl_simd_sum_u32(x)",
            "prefix": "__msl_simd_prefix_exclusive_sum_u32(x)",
            "first": "__msl_simd_broadcast_first(x)",
            "quad": "__msl_quad_sum_u32(x)",
        }[kind]

        def value(x: list[int], mask: set[int], lane: int) -> int:
            match kind:
                case "ballot":
                    return sum(1 << other for other in mask if x[other] & 4)
                case "sum":
                    return sum(x[other] for other in mask)
                case "prefix":
                    return sum(x[other] for other in mask if other < lane)
                case "first":
                    return x[min(mask)]
                case _:
                    return sum(x[other] for other in mask if other // 4 == lane // 4)

        def execute(state: Lanes, mask: set[int]) -> None:
            values = {lane: value(state.x, mask, lane) for lane in mask}
            for lane in mask:
                state.x[lane] = (state.x[lane] * 31 + values[lane]) & WORD

        return f"x = x * 31u + {text};", execute

    def call(self) -> Statement:
        name, (_, body) = self.random.choice(self.helpers)

        def execute(state: Lanes, mask: set[int]) -> None:
            inner = Lanes(list(state.x))
            body(inner, set(mask))
            for lane in mask:
                state.x[lane] = inner.x[lane]

        return f"x = {name}(x);", execute

    def condition(self) -> tuple[str, Callable[[int], bool]]:
        modulus = self.random.randrange(2, 6)
        rest = self.random.randrange(modulus)
        shift = self.random.randrange(12)
        return f"(x >> {shift}) % {modulus}u == {rest}u", lambda x: (x >> shift) % modulus == rest

    def leave(self, *, in_loop: bool) -> Statement:
        """One way out of here."""
        kind = self.random.choice(("break", "continue", "return") if in_loop else ("return",))

        def execute(state: Lanes, mask: set[int]) -> None:
            match kind:
                case "break":
                    state.broken[-1] |= mask
                case "continue":
                    state.continued[-1] |= mask
                case _:
                    state.returned |= mask

        return ("return x;" if kind == "return" else f"{kind};"), execute

    def branch(self, depth: int, *, in_loop: bool) -> Statement:
        test_text, test = self.condition()
        then_text, then = self.body(3, depth + 1, in_loop=in_loop)
        if self.random.random() < 0.3:
            leave_text, leave = self.leave(in_loop=in_loop)
            then_text, first = f"{then_text}\n{leave_text}", then

            def then(state: Lanes, mask: set[int]) -> None:
                first(state, mask)
                mask = state.running(mask)
                if mask:
                    leave(state, mask)

        else_text, otherwise = self.body(2, depth + 1, in_loop=in_loop)
        has_else = self.random.random() < 0.6

        def execute(state: Lanes, mask: set[int]) -> None:
            taken = {lane for lane in mask if test(state.x[lane])}
            if taken:
                then(state, taken)
            if has_else and mask - taken:
                otherwise(state, mask - taken)

        tail = f" else {{\n{else_text}\n}}" if has_else else ""
        return f"if ({test_text}) {{\n{then_text}\n}}{tail}", execute

    def loop(self, state: Lanes, mask: set[int], body: Callable[[set[int]], set[int]]) -> None:
        """Iterations of ``body``, which gives those that want another one."""
        state.broken.append(set())
        state.continued.append(set())
        while mask:
            state.continued[-1] = set()
            mask = body(mask) - state.broken[-1] - state.returned
        state.broken.pop()
        state.continued.pop()

    def counted(self, depth: int, *, in_loop: bool) -> Statement:
        """``for`` with a count that differs from lane to lane."""
        name, modulus = self.name(), self.random.randrange(2, 5)
        text, inner = self.body(3, depth + 1, in_loop=True)

        def execute(state: Lanes, mask: set[int]) -> None:
            counts = {lane: state.x[lane] % modulus for lane in mask}
            done = 0

            def body(mask: set[int]) -> set[int]:
                nonlocal done
                inner(state, mask)
                done += 1
                return {lane for lane in mask if done < counts[lane]}

            self.loop(state, {lane for lane in mask if counts[lane]}, body)

        head = f"for (uint {name} = 0, n{name} = x % {modulus}u; {name} < n{name}; ++{name})"
        return f"{head} {{\n{text}\n}}", execute

    def repeated(self, depth: int, *, in_loop: bool) -> Statement:
        """``do`` with a condition at its end."""
        name, most = self.name(), self.random.randrange(1, 4)
        test_text, test = self.condition()
        text, inner = self.body(3, depth + 1, in_loop=True)

        def execute(state: Lanes, mask: set[int]) -> None:
            done = 0

            def body(mask: set[int]) -> set[int]:
                nonlocal done
                inner(state, mask)
                done += 1
                return {lane for lane in mask if done < most and test(state.x[lane])}

            self.loop(state, mask, body)

        head = f"uint {name} = 0; do {{\n{text}\n}}"
        return f"{{ {head} while (++{name} < {most}u && {test_text}); }}", execute

    def retried(self, depth: int, *, in_loop: bool) -> Statement:
        """``while (true)`` that goes on only by ``continue``, so that the end of its body leads out."""
        name, most = self.name(), self.random.randrange(2, 4)
        test_text, test = self.condition()
        # Only the part behind the count may leave by `continue`, or the loop need not end.
        first_text, first = self.body(2, depth + 1, in_loop=False)
        again_text, again = self.body(2, depth + 1, in_loop=True)
        last_text, last = self.body(2, depth + 1, in_loop=False)
        leave = self.random.choice(("break", "return x"))

        def execute(state: Lanes, mask: set[int]) -> None:
            counts = dict.fromkeys(mask, 0)

            def body(mask: set[int]) -> set[int]:
                first(state, mask)
                mask, going = state.running(mask), state.continued[-1]
                retrying = set()
                for lane in mask:
                    counts[lane] += 1
                    if counts[lane] < most and test(state.x[lane]):
                        retrying.add(lane)
                if retrying:
                    again(state, retrying)
                    state.continued[-1] = state.continued[-1] | state.running(retrying)
                if mask - retrying:
                    last(state, mask - retrying)
                    leaving = state.running(mask - retrying)
                    (state.returned if leave == "return x" else state.broken[-1]).update(leaving)
                return going | state.continued[-1]

            self.loop(state, mask, body)

        retry = f"if (++{name} < {most}u && {test_text}) {{\n{again_text}\ncontinue;\n}}"
        return (
            f"{{ uint {name} = 0; while (true) {{\n{first_text}\n{retry}\n{last_text}\n{leave}; }} }}",
            execute,
        )

    def switch(self, depth: int, *, in_loop: bool) -> Statement:
        """Three cases, of which the first may fall through into the second."""
        falls = self.random.random() < 0.5
        bodies = [self.body(2, depth + 1, in_loop=False) for _ in range(3)]

        def execute(state: Lanes, mask: set[int]) -> None:
            # `break` and `continue` are not generated inside, so that only returns leave early.
            groups = [{lane for lane in mask if state.x[lane] % 3 == case} for case in range(3)]
            if groups[0]:
                bodies[0][1](state, groups[0])
            if falls:
                groups[1] |= groups[0] - state.returned
            for group, (_, body) in list(zip(groups, bodies, strict=True))[1:]:
                if group:
                    body(state, group)

        first, second, third = (text for text, _ in bodies)
        stop = "" if falls else "break;"
        cases = f"case 0: {{\n{first}\n}} {stop}\ncase 1: {{\n{second}\n}} break;\ndefault: {{\n{third}\n}}"
        return f"switch (x % 3u) {{\n{cases}\n}}", execute
