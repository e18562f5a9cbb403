"""Near scores, `[64 rows][2052 keys][32 heads]` at d = 128: the CPU engine beside PoCL and NumPy.

Every contender runs in this process, interleaved, and the shortest time of each counts. PoCL and `run_`
write into memory they keep; a call makes new arrays, as a user's call does.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
import numpy as np
from peers.opencl_near import best_time, near_scores, numpy_scores

import lab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("rows", 64), ("keys", 2052), ("groups", 8), ("hpg", 4), ("d", 128), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    s = parser.parse_args()
    random = np.random.default_rng(0)
    q = random.standard_normal((s.rows, s.groups * s.hpg, s.d), dtype=np.float32)
    k = random.standard_normal((s.groups, s.keys, s.d), dtype=np.float32)
    kernel = lab.compile(
        Path(__file__).with_name("kernels") / "near_scores.metal", defines={"HPG": s.hpg, "D": s.d}
    ).near_scores
    inputs = mx.array(q), mx.array(k)
    out = mx.zeros((s.rows, s.groups, s.keys, s.hpg))
    mx.eval(*inputs, out)
    args = {"keys": s.keys, "groups": s.groups, "scale": 1.0}
    size = {"grid": (s.keys, s.groups, s.rows), "threadgroup": (64, 1, 1)}

    exact = numpy_scores(q.astype(np.float64), k.astype(np.float64))
    exact = exact.reshape(s.groups, s.rows, s.hpg, s.keys).transpose(1, 0, 3, 2)
    contenders = {
        "Metal on the CPU engine, in place": lambda: kernel.run_(*inputs, out, args, **size),
        "Metal on the CPU engine, new arrays": lambda: kernel(*inputs, lab.empty(out.shape), args, **size),
        "NumPy matrix product": lambda: numpy_scores(q, k),
    }
    pocl = near_scores(q, k)
    if pocl is not None:
        contenders[pocl[1]] = pocl[0]
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(s.rounds):
        for name, run in contenders.items():
            best[name] = min(best[name], best_time(run, 3))
    deviation = np.abs(np.asarray(contenders["Metal on the CPU engine, new arrays"]()) - exact).max()
    print(f"deviation from float64: {deviation / np.abs(exact).max():.1e} of the largest score")
    for name, seconds in best.items():
        ratio = f"{seconds / best[pocl[1]]:5.2f} of PoCL" if pocl is not None else ""
        rate = 2 * q.size * s.keys / seconds / 1e9
        print(f"{name:44} {seconds * 1e3:8.2f} ms {rate:7.1f} GFLOP/s   {ratio}")


if __name__ == "__main__":
    main()
