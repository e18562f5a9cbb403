"""The QSA system's kernels in microseconds, beside the same steps written for NumPy float32 and for MLX.

Each round runs the three paths and both peers one after the other in this process, on the same cache, scores
and cells, so that what slows the machine slows them all; the medians of the rounds count. Attention is one
step for the peers and two kernels here. Before anything is timed the peers have to choose the kernel's cells.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np
from peers import qsa_mlx, qsa_numpy

import lab.qsa

# What is timed, and the step of the peers that does the same. A "+" adds up what one call took for both.
ROWS = {
    "qsa_quant": "quantise",
    "qsa_score": "score",
    "qsa_topk": "select",
    "qsa_topk2": "select",
    "qsa_attn": "",
    "qsa_merge": "",
    "qsa_attn + qsa_merge": "attend",
    "qsa_attn2": "",
    "qsa_merge2": "",
    "qsa_attn2 + qsa_merge2": "attend",
    "qsa_attn3": "",
    "qsa_attn3 + qsa_merge": "attend",
    "v1": "all",
    "v2": "all",
    "v3": "all",
}
Times = Mapping[str, list[float]]


def steps(peer: Any, quantise: Callable[..., Any], qfull: Any, qcur: Any, k: Any, v: Any, *chosen: Any):
    """The steps of a peer by name, on the scores and cells in ``chosen`` and after ``pos0`` cells."""
    scores, ids, pos0, budget = chosen
    return {
        "quantise": lambda: (quantise(k), quantise(v)),
        "score": lambda: peer.score(qcur, pos0),
        "select": lambda: peer.select(scores, pos0, budget),
        "attend": lambda: peer.attend(qcur, qfull, ids),
    }


def off(out: Any, wanted: np.ndarray) -> float:
    """The largest deviation as a share of the largest output."""
    return float(np.abs(np.asarray(out) - wanted).max() / np.abs(wanted).max())


def measure(cells: int, n_tok: int, rounds: int, engine: str) -> dict[str, Times]:
    """Seconds of every round by who took them and for what: ``lab``, ``NumPy``, ``MLX``."""
    sizes = lab.qsa.Sizes(max_cells=cells)
    pos0 = cells - n_tok
    session = lab.qsa.session(engine)
    cache, *inputs = lab.qsa.example(sizes, pos0, n_tok)
    mx.eval(*inputs)
    plans = {path: lab.qsa.plan(sizes, path, n_tok, pos0) for path in lab.qsa.PATHS}

    trace = session.trace(cache, *inputs, path="v1")
    found = {step.kernel: step for step in trace}
    scores = found["qsa_score"].value("scores").copy()
    ids = [row[: min(pos0 + t + 1, sizes.qbudget)] for t, row in enumerate(found["qsa_topk"].value("ids"))]
    wanted = lab.qsa.attention(cache, *inputs, ids=ids)
    cache.append(*inputs[2:])

    panels = [np.asarray(cache.arrays[name]) for name in ("kq", "ksc", "vq", "vsc")]
    chosen = scores, [i.astype(np.intp) for i in ids], pos0, sizes.qbudget
    by_numpy = steps(
        qsa_numpy.NumpyPeer(*panels), qsa_numpy.quantise, *(np.asarray(x) for x in inputs), *chosen
    )
    by_mlx = qsa_mlx.MlxPeer(*panels)
    chosen = mx.array(scores), [mx.array(i) for i in ids], pos0, sizes.qbudget
    mx.eval(chosen[:2])
    peers = {"NumPy": by_numpy, "MLX": steps(by_mlx, by_mlx.quantise, *inputs, *chosen)}
    deviations = {}
    for name, peer in peers.items():
        for t, theirs in enumerate(peer["select"]()):
            if not np.array_equal(np.asarray(theirs), ids[t]):
                raise SystemExit(f"{name} selects other cells than qsa_topk for token {t} of {cells} cells.")
        deviations[name] = off(peer["attend"](), wanted)

    times: dict[str, dict[str, list[float]]] = {who: defaultdict(list) for who in ("lab", *peers)}
    named = dict(zip(("qfull", "qcur", "k", "v"), inputs, strict=True))
    for number in range(rounds + 1):
        for path, plan in plans.items():
            arrays = {**cache.arrays, **named, "xp": mx.zeros(inputs[1].shape)}
            mx.eval(arrays["xp"])
            seconds = session.execute(plan, arrays)
            deviations[path] = off(arrays["xp"], wanted)
            took: dict[str, float] = defaultdict(float)
            for dispatch, each in zip(plan.dispatches, seconds, strict=True):
                took[dispatch.kernel] += each
            took[" + ".join([*took][-2:])] = sum(seconds[-2:])
            took[path] = sum(seconds)
            if number:  # the first round compiles
                for name, each in took.items():
                    times["lab"][name].append(each)
        for who, peer in peers.items():
            taken = {}
            for name, step in peer.items():
                started = time.perf_counter()
                step()
                taken[name] = time.perf_counter() - started
            taken["all"] = sum(taken.values())
            if number:
                for name, each in taken.items():
                    times[who][name].append(each)
    told = ", ".join(f"{name} {deviation:.1e}" for name, deviation in deviations.items())
    print(f"{cells} cells, outputs' deviation from float64: {told}", flush=True)
    return times


def line(name: str, cells: Mapping[int, Mapping[str, Times]]) -> str:
    """One line of the table: microseconds, each peer's, and the ratio of the two."""
    parts = [f"{name:23}"]
    for times in cells.values():
        micro = np.median(times["lab"][name]) * 1e6
        parts.append(f"{micro:9.0f}")
        for peer in ("NumPy", "MLX"):
            if step := ROWS[name]:
                theirs = np.median(times[peer][step]) * 1e6
                parts.append(f"{theirs:9.0f} {micro / theirs:7.2f}")
            else:
                parts.append(17 * " ")
    return " ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, nargs="+", default=[5000, 60000])
    parser.add_argument("--n-tok", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--engine", default="auto")
    given = parser.parse_args()
    measured = {cells: measure(cells, given.n_tok, given.rounds, given.engine) for cells in given.cells}

    print(f"\nn_tok {given.n_tok}: microseconds, medians of {given.rounds} rounds, kernel / peer as ratio")
    print(" ".join([23 * " ", *(f"{f'{cells} cells':>45}" for cells in measured)]))
    print(
        " ".join(
            [23 * " ", *(f"{'lab':>9} {'NumPy':>9} {'ratio':>7} {'MLX':>9} {'ratio':>7}" for _ in measured)]
        )
    )
    for name in ROWS:
        print(line(name, measured))


if __name__ == "__main__":
    main()
