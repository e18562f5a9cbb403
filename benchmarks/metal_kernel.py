"""What a call of ``lab.metal_kernel`` costs: cold, from the cache, warm.

    python benchmarks/metal_kernel.py            overhead
    python benchmarks/metal_kernel.py --package  five kernels of mlx-lm beside its own MLX operations

Times are wall times, the least and the median of the repetitions.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

import lab

ARGUMENTS: dict[str, Any] = dict(
    name="add",
    input_names=["a", "b"],
    output_names=["out"],
    source="uint i = thread_position_in_grid.x; out[i] = a[i] + b[i];",
)


def call(kernel: Callable[..., Any], x: mx.array) -> mx.array:
    """One call over an array."""
    return kernel(
        inputs=[x, x],
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
        grid=(x.size, 1, 1),
        threadgroup=(256, 1, 1),
    )[0]


def timed(run: Callable[[], object], repeat: int) -> tuple[float, float]:
    """The least and the median time of ``run`` in seconds."""
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times), statistics.median(times)


def shown(what: str, times: tuple[float, float]) -> None:
    print(f"{what:44} {times[0] * 1e6:12.0f} us {times[1] * 1e6:12.0f} us")


def first_call() -> None:
    """Print the seconds of the first call in this process."""
    x = mx.zeros(256)
    mx.eval(x)
    lab.compile("kernel void f(device float* a) { a[0] = 1; }").f.describe()  # the lab's own headers
    kernel = lab.metal_kernel(**ARGUMENTS)
    print(timed(lambda: mx.eval(call(kernel, x)), 1)[0])


def in_a_new_process(cache: str) -> float:
    environment = {**os.environ, "METAL_LAB_CACHE": cache}
    command = [sys.executable, __file__, "--first"]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def overhead() -> None:
    with tempfile.TemporaryDirectory() as cache:
        cold, kept = in_a_new_process(cache), in_a_new_process(cache)
    shown("first call, nothing in the cache", (cold, cold))
    shown("first call of a process, kernel in the cache", (kept, kept))
    kernel = lab.metal_kernel(**ARGUMENTS)
    x = mx.zeros(256)
    mx.eval(x, call(kernel, x))
    shown("warm call", timed(lambda: call(kernel, x), 2000))
    shown("warm call, result evaluated", timed(lambda: mx.eval(call(kernel, x)), 2000))
    shown("the same addition by MLX, evaluated", timed(lambda: mx.eval(x + x), 2000))


def package() -> None:
    """Kernels of mlx-lm, and the operations of MLX that do the same."""
    lab.install()
    from mlx_lm import kernels  # type: ignore[import-not-found]
    from mlx_lm.models import gated_delta  # type: ignore[import-not-found]
    from mlx_lm.tuner import losses  # type: ignore[import-not-found]

    mx.random.seed(0)
    logits = [mx.random.normal((4, 32000)) for _ in range(2)]
    q, k = (mx.random.normal((1, 16, 4, 64)) for _ in range(2))
    v, state = mx.random.normal((1, 16, 4, 64)), mx.random.normal((1, 4, 64, 64))
    g, beta = mx.random.uniform(shape=(1, 16, 4)), mx.random.uniform(shape=(1, 16, 4))
    heads: dict[str, Any] = dict(n_heads=16, n_kv_heads=4, head_dim=128, eps=1e-5, query_scale=1.0)
    qkvg = mx.random.normal((1, 64, 2 * 20 * 128))
    scores, bias = mx.random.normal((1, 64, 128)), mx.zeros(128)
    routing: dict[str, Any] = dict(top_k=8, multiplier=1.0, score_eps=1e-6, route_scale=1.0)

    def norms() -> list[mx.array]:
        def normed(n: int, first: int) -> mx.array:
            x = qkvg[..., first : first + n * 128].reshape(1, 64, n, 128)
            return mx.fast.rms_norm(x, None, 1e-5)

        return [normed(16, 0), normed(4, 16 * 128)]

    def routed() -> list[mx.array]:
        s = mx.sigmoid(scores)
        chosen = mx.argsort(-(s + bias), axis=-1)[..., :8]
        weights = mx.take_along_axis(s, chosen, axis=-1)
        return [chosen, weights / (weights.sum(-1, keepdims=True) + 1e-6)]

    def on_the_cpu(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
        def run() -> Any:
            with mx.stream(mx.cpu):
                return function(*arguments)

        return run

    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "kl_div_loss": (lambda: losses.kl_div_loss(*logits), on_the_cpu(losses.kl_div_loss, *logits)),
        "js_div_loss": (lambda: losses.js_div_loss(*logits), on_the_cpu(losses.js_div_loss, *logits)),
        "qk_norm": (lambda: kernels.qk_norm(qkvg, **heads), norms),
        "expert_routing": (lambda: kernels.expert_routing(scores, bias, **routing), routed),
        "gated_delta": (
            lambda: gated_delta.gated_delta_kernel(q, k, v, g, beta, state),
            lambda: gated_delta.gated_delta_ops(q, k, v, g, beta, state),
        ),
    }
    for name, (kernel, operations) in pairs.items():
        for what, run in (("kernel", kernel), ("operations of MLX", operations)):
            mx.eval(run())
            shown(f"{name}, {what}", timed(lambda run=run: mx.eval(run()), 20))  # type: ignore[misc]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--package", action="store_true", help="kernels of mlx-lm, which must be installed")
    chosen = parser.parse_args()
    first_call() if chosen.first else package() if chosen.package else overhead()
