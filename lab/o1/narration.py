"""What happens in a dispatch of the o1 system, in words: for one row and query head, with their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..systems.trace import Step, Trace
from . import readings

__all__ = ["happens", "split_words"]

LANDMARKS = 4  # of which masses are told one by one
_NAMES = ("sinks", "window", "its own chunk", "far field")  # of readings.PARTS


def happens(trace: Trace, position: int, row: int, head: int) -> str:
    """What the last of the first ``position`` dispatches did, told by ``row`` and query head ``head``.

    Where the row is not one of its chunk, the chunk's last one is told of. Numbers are the kernels'. Raises
    ArgumentError for a position, row or head that there is not.
    """
    weights = readings.weights(trace, position, row, head)  # refuses what there is not
    if not position:
        return "Nothing has run yet. The first dispatch is one step ahead."
    step = trace[position - 1]
    if step.fault:
        return f"{step.kernel} did not come to its end, and nothing that it wrote counts."
    if step.kernel not in _TOLD:
        return ""
    rows = range(step.plan.first, step.plan.first + step.plan.rows)
    if row not in rows:
        row = rows[-1]
        weights = readings.weights(trace, position, row, head)
    scene = _Scene(trace, position, step, row, head, weights)
    return " ".join(_TOLD[step.kernel](scene))


def split_words(weights: readings.Weights) -> str:
    """How the row's attention is split, by the kernels; "" before they have written it."""
    shares = weights.split()
    if np.isnan(shares).any():
        return ""
    told = ", ".join(f"{share:.1%} {name}" for share, name in zip(shares, _NAMES, strict=True))
    return f"Row {weights.row} attends with head {weights.head}: {told}."


class _Scene:
    """A dispatch that was run, and the row and head it is told by."""

    def __init__(
        self, trace: Trace, position: int, step: Step, row: int, head: int, weights: readings.Weights
    ) -> None:
        self.step, self.row, self.head, self.weights = step, row, head, weights
        z = trace.about["sizes"]
        self.m, self.group = int(z["m"]), head // int(z["hpg"])
        self.ring = readings.rings(trace, position)[self.group]
        self.before = readings.rings(trace, position - 1)[self.group]
        self.flow = readings.flow(trace, position, head)
        self.far = weights.evicted
        self.sinks, self.window, self.chunk, _ = np.bincount(weights.parts, minlength=4).tolist()

    def value(self, buffer: str, *index: int) -> float:
        return float(self.step.value(buffer)[index])

    @property
    def i(self) -> int:
        """The row in its chunk."""
        return self.row - self.step.plan.first

    @property
    def seen(self) -> str:
        """What the row sees of what is near."""
        sinks = f"{_count(self.sinks, 'sink')} and " if self.sinks else ""
        return f"{sinks}{_count(self.window + self.chunk, 'token')} of the window, itself included"


Telling = Callable[[_Scene], Iterator[str]]


def _evicts(scene: _Scene) -> Iterator[str]:
    flow, ring = scene.flow, scene.before
    if not flow.tokens.size:
        yield (
            f"The ring of group {ring.group} has room, {ring.length} of {ring.window} slots are filled: "
            "nothing leaves it, and no landmark gets anything."
        )
        return
    one = len(flow.tokens) == 1
    yield f"{_tokens(flow.tokens)} will leave {_slots(flow.slots)} of group {ring.group} for the far field."
    whose = "It weighs" if one else f"The first of them, token {flow.tokens[0]}, weighs"
    yield (
        f"{whose} {_listed(flow.weights[0])} on the landmarks of head {scene.head}, relative to the largest "
        "exponent that each has met."
    )


def _land(scene: _Scene) -> Iterator[str]:
    far = _count(scene.far, "token")
    yield (
        f"Row {scene.row}'s query meets the {_count(scene.m, 'landmark key')}: through them it will see the "
        + (f"{far} that left the window." if scene.far else "far field, in which there is nothing yet.")
    )


def _far(scene: _Scene) -> Iterator[str]:
    c, denominator, counts = (scene.value("hd", scene.i, scene.head, n) for n in range(3))
    yield from _far_part(scene, c, denominator, counts == 1)


def _far_part(scene: _Scene, c: float, denominator: float, counts: bool) -> Iterator[str]:
    if not scene.far:
        yield f"Nothing has left the window up to row {scene.row}: it has no far field."
    elif counts:
        yield (
            f"For row {scene.row} and head {scene.head} the far field, {_count(scene.far, 'token')}, has a "
            f"mass of {_number(denominator)}, relative to exp({_number(c)})."
        )
    else:
        yield (
            f"For row {scene.row} and head {scene.head} the far field's mass comes out negative or not a "
            "number: its part is left out."
        )


def _score(scene: _Scene) -> Iterator[str]:
    yield f"Row {scene.row}'s query meets the keys of what it sees: {scene.seen}."
    yield "These are scores, no weights yet."


def _max(scene: _Scene) -> Iterator[str]:
    largest = scene.value("nm", scene.i, scene.head)
    yield (
        f"The largest score of row {scene.row} and head {scene.head} is {_number(largest)}. Exponentials are "
        "taken relative to a maximum, so that none overflows."
    )


def _soft(scene: _Scene) -> Iterator[str]:
    yield "Scores become weights, exp(score - c), and their sum with the far field's mass is inverted."
    yield split_words(scene.weights)


def _sum(scene: _Scene) -> Iterator[str]:
    yield f"The values that row {scene.row} sees are weighed and added up, in 8 pieces of its columns."


def _output(scene: _Scene) -> Iterator[str]:
    rows = scene.step.plan.first + np.arange(scene.step.plan.rows)
    has = "has its" if len(rows) == 1 else "have their"
    yield (
        "The near values, the landmarks' sums and the values of evicted tokens come together and are divided "
        f"by the row's mass: {_several('row', rows)} {has} output."
    )
    yield split_words(scene.weights)


def _far_commit(scene: _Scene) -> Iterator[str]:
    flow = scene.flow
    if not flow.tokens.size:
        yield "Nothing leaves the ring, so the landmarks' masses stay what they are."
        return
    yield f"The weight of {_tokens(flow.tokens).lower()} flows into the landmarks' masses."
    told = [
        f"landmark {b} {_number(flow.masses[b])} → {_number(flow.after[b])}"
        for b in range(min(scene.m, LANDMARKS))
    ]
    more = f", and so on to landmark {scene.m - 1}" if scene.m > LANDMARKS else ""
    yield f"Head {scene.head}: {', '.join(told)}{more}."
    if (flow.rescale < 1).any() and np.isfinite(flow.maxima).any():
        yield "Where a new exponent is the largest so far, what was there has been scaled down to it."


def _ring_commit(scene: _Scene) -> Iterator[str]:
    ring, entering = scene.ring, scene.before.entering
    written = ring.written[np.argsort(ring.tokens[ring.written])]
    if not np.array_equal(ring.tokens[written], entering):
        changed = f"what changed is {_slots(ring.written)}" if ring.written.size else "no slot changed"
        yield f"{_tokens(entering)} should be in the ring of group {ring.group} now, but {changed}."
        return
    verb = "enters" if len(entering) == 1 else "enter"
    place = f", where {_tokens(ring.evicted).lower()} lay" if ring.evicted.size else ", empty until now"
    yield f"{_tokens(entering)} {verb} {_slots(written)} of group {ring.group}{place}."


def _meta(scene: _Scene) -> Iterator[str]:
    old, new = scene.before, scene.ring
    told = [
        f"{name} {a} → {b}" if a != b else f"{name} stays {a}"
        for name, a, b in (
            ("length", old.length, new.length),
            ("head", old.head, new.head),
            ("far count", old.far, new.far),
        )
    ]
    yield f"meta follows, last of all. Group {new.group}: {', '.join(told)}."


def _gather(scene: _Scene) -> Iterator[str]:
    columns = scene.step.plan.buffers["kp"].shape[1]
    yield (
        "Sinks, ring from its oldest token and the rows of the chunk are laid side by side in "
        f"{columns} columns, so that two matrix products can do the near part."
    )


def _scores_product(scene: _Scene) -> Iterator[str]:
    yield "One matrix product gives every row's scores with every column."
    yield "What a row may not see is left out later."


def _values_product(scene: _Scene) -> Iterator[str]:
    yield "A second matrix product weighs the values and adds them up."


def _tok_near(scene: _Scene) -> Iterator[str]:
    yield (
        f"What row {scene.row} sees, {scene.seen}, is shared out to 32 simdgroups. Each keeps the maximum, "
        "the sum and the weighed values of its own stripe of columns."
    )


def _tok_far(scene: _Scene) -> Iterator[str]:
    yield from _evicts(scene)
    c, denominator, counts = (scene.value("fo", scene.head, n) for n in range(3))
    yield from _far_part(scene, c, denominator, counts == 1)


def _tok_commit(scene: _Scene) -> Iterator[str]:
    yield from _far_commit(scene)
    yield from _ring_commit(scene)
    yield from _meta(scene)


_TOLD: dict[str, Telling] = {
    "o1c_far_e": _evicts,
    "o1c_score": _score,
    "o1c_land": _land,
    "o1c_max": _max,
    "o1c_far": _far,
    "o1c_soft": _soft,
    "o1c_sum": _sum,
    "o1c_add": _output,
    "o1c_far_commit": _far_commit,
    "o1c_ring_commit": _ring_commit,
    "o1c_meta": _meta,
    "o1c_gather": _gather,
    "matmul_scores": _scores_product,
    "o1c_gmax": _max,
    "o1c_gsoft": _soft,
    "matmul_values": _values_product,
    "o1c_gadd": _output,
    "o1c_tok_near": _tok_near,
    "o1c_tok_far": _tok_far,
    "o1c_tok_merge": _output,
    "o1c_tok_commit": _tok_commit,
}


# ---- numbers -------------------------------------------------------------------------------------------


def _number(value: float) -> str:
    return f"{value:.3g}" if np.isfinite(value) else "–" if np.isnan(value) else f"{value}"


def _listed(values: Sequence[float] | np.ndarray) -> str:
    first = ", ".join(_number(float(value)) for value in values[:LANDMARKS])
    return f"{first}, …" if len(values) > LANDMARKS else first


def _count(number: int, of: str) -> str:
    return f"{number} {of}" if number == 1 else f"{number} {of}s"


def _several(what: str, numbers: np.ndarray) -> str:
    """Such as: slot 3; slots 3 and 4; slots 3 to 9; slots 7, 0 and 1; slots 94 on to 3."""
    found = numbers.tolist()
    if len(found) == 1:
        return f"{what} {found[0]}"
    if len(found) > 2 and found == list(range(found[0], found[0] + len(found))):
        return f"{what}s {found[0]} to {found[-1]}"
    if len(found) > 5:
        return f"{what}s {found[0]} on to {found[-1]}"
    return f"{what}s {', '.join(map(str, found[:-1]))} and {found[-1]}" if found else f"no {what}"


def _tokens(numbers: np.ndarray) -> str:
    text = _several("token", numbers)
    return text[0].upper() + text[1:]


def _slots(numbers: np.ndarray) -> str:
    return _several("slot", numbers)
