"""The o1 system's three paths: microseconds per dispatch, per chunk and per token, beside exact attention.

The layer is in its steady state: the ring is full and every row evicts. The peers, NumPy's and MLX's float32
attention, see the same near window, and do neither the far field nor the state. Everything runs in this
process, interleaved, and the shortest time of each counts.
"""

from __future__ import annotations

import argparse
import time

import mlx.core as mx
import numpy as np
from peers.near_attention import columns_seen, mlx_attention, numpy_attention

import lab.o1


def steady(sizes: lab.o1.Sizes, seed: int = 0) -> lab.o1.State:
    """A layer whose ring is full and has been gone around once more in part."""
    state, q, k, v = lab.o1.example(sizes, sizes.w + 2 * sizes.longest_chunk, seed)
    lab.o1.run(state, q, k, v, path="matmul")
    return state


def chunk_of(sizes: lab.o1.Sizes, rows: int) -> dict[str, mx.array]:
    """Inputs and output of one chunk."""
    _, q, k, v = lab.o1.example(sizes, rows, 1)
    arrays = {"q": q, "k": k, "v": v, "out": mx.zeros(q.shape)}
    mx.eval(*arrays.values())
    return arrays


def near_panels(state: lab.o1.State) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of the sinks and the ring, from the oldest: [ng][ns + w][d]."""
    heads = np.asarray(state.meta)[:, 1]
    panels = []
    for ring, sinks in ((state.ring_k, state.sink_k), (state.ring_v, state.sink_v)):
        rolled = [np.roll(r, -int(head), axis=0) for r, head in zip(np.asarray(ring), heads, strict=True)]
        panels.append(np.concatenate([np.asarray(sinks), np.stack(rolled)], axis=1))
    return panels[0], panels[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = {"ng": 8, "hpg": 4, "d": 128, "w": 2048, "ns": 4, "m": 16, "rounds": 5}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 1])
    given = vars(parser.parse_args())
    rounds, lengths = given.pop("rounds"), given.pop("rows")
    sizes = lab.o1.Sizes(**given)
    state = steady(sizes)
    for rows in lengths:
        measure(sizes, state, rows, rounds)


def off(out: object, wanted: np.ndarray) -> float:
    """The largest deviation as a share of the largest output."""
    return float(np.abs(np.asarray(out) - wanted).max() / np.abs(wanted).max())


def measure(sizes: lab.o1.Sizes, state: lab.o1.State, rows: int, rounds: int) -> None:
    paths = [path for path in lab.o1.PATHS if path != "token" or rows == 1]
    session = lab.o1.session()
    inputs = chunk_of(sizes, rows)
    given = inputs["q"], inputs["k"], inputs["v"]
    wanted = lab.o1.attention(state, *given)
    deviations = {
        path: off(session.run(state.copy(), *given, chunks=rows, path=path), wanted) for path in paths
    }
    panels = [
        np.concatenate([panel, np.asarray(inputs[name]).transpose(1, 0, 2)], axis=1)
        for panel, name in zip(near_panels(state), "kv", strict=True)
    ]
    seen = columns_seen(sizes.ns, sizes.w, sizes.w, rows)
    exact = np.asarray(inputs["q"]), *panels, sizes.scale, seen
    by_mlx = mlx_attention(*exact)
    near = numpy_attention(*(x.astype(np.float64) for x in exact[:3]), *exact[3:])
    deviations["NumPy, near window"] = off(numpy_attention(*exact), near)
    deviations["MLX, near window"] = off(by_mlx()[0].transpose(1, 0, 2), near)
    peers = {"NumPy, near window": lambda: numpy_attention(*exact), "MLX, near window": by_mlx}

    dispatches: dict[str, list[list[float]]] = {path: [] for path in paths}
    wholes: dict[str, list[float]] = {name: [] for name in (*paths, *peers)}
    plans = {path: lab.o1.plan(sizes, path, rows) for path in paths}
    state = state.copy()  # what follows pushes chunk after chunk
    for _ in range(rounds * max(1, 8 // rows) + 1):  # the first one compiles, and is not counted
        for path, plan in plans.items():
            arrays = {**state.arrays, **inputs}
            started = time.perf_counter()
            dispatches[path].append(session.execute(plan, arrays))
            wholes[path].append(time.perf_counter() - started)
        for name, run in peers.items():
            started = time.perf_counter()
            run()
            wholes[name].append(time.perf_counter() - started)

    print(f"\nk = {rows}: {sizes}")
    best = {name: min(times[1:]) * 1e6 for name, times in wholes.items()}
    peer = best["NumPy, near window"]
    for name, micro in best.items():
        each = f"{micro:10.0f} us a chunk {micro / rows:10.1f} us a token"
        print(f"  {name:20} {each} {micro / peer:7.2f} of NumPy, {deviations[name]:.1e} from float64")
    for path in paths:
        least = np.min(dispatches[path][1:], axis=0) * 1e6
        print(f"  {path}:")
        for dispatch, micro in zip(plans[path].dispatches, least, strict=True):
            print(f"    {dispatch.kernel:18} {micro:10.0f} us")


if __name__ == "__main__":
    main()
