"""Near scores in OpenCL C on PoCL, the CPU peer that the `cpu` engine is measured against.

    out[row][g][key][h] = scale * sum_i q[row][g * hpg + h][i] * k[g][key][i]

A work-item per (key, group, row) makes the `hpg` products of one key, as a thread of `o1c_score` does: one
`float4` accumulator for each head, summed across at the end; hpg and d are constants of the build. PoCL comes
with the project's extra `bench`; run as a script, this file times it and NumPy's matrix product and compares
both with float64.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np

SOURCE = """
kernel void near_scores(global const float4* q, global const float4* k, global float* out,
                        uint keys, uint ng, float scale) {
    uint key = get_global_id(0), g = get_global_id(1), row = get_global_id(2);
    if (key >= keys) return;
    global const float4* kp = k + (g * keys + key) * D4;
    global const float4* qp = q + (row * ng + g) * HPG * D4;
    float4 acc[HPG];
    #pragma unroll
    for (uint h = 0; h < HPG; h++) acc[h] = 0.0f;
    for (uint i = 0; i < D4; i++) {
        float4 kv = kp[i];
        #pragma unroll
        for (uint h = 0; h < HPG; h++) acc[h] += qp[h * D4 + i] * kv;
    }
    global float* o = out + ((row * ng + g) * keys + key) * HPG;
    #pragma unroll
    for (uint h = 0; h < HPG; h++) o[h] = scale * (acc[h].x + acc[h].y + acc[h].z + acc[h].w);
}
"""

OPTIONS = ("", "-cl-fast-relaxed-math")
LOCAL_SIZES = ((64, 1, 1), (128, 1, 1), (256, 1, 1), (1024, 1, 1), None)


def pocl_queue():
    """A command queue on PoCL's CPU device, or a sentence that says why there is none."""
    try:
        import pyopencl as cl
    except ImportError:
        return "the OpenCL peer is left out: pip install 'pyopencl[pocl]' brings it"
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        return f"the OpenCL peer is left out: {error}"
    for platform in platforms:
        if "Portable Computing Language" in platform.name:
            device = platform.get_devices(cl.device_type.CPU)[0]
            return cl.CommandQueue(cl.Context([device]))
    return "the OpenCL peer is left out: no PoCL among the OpenCL platforms (pip install 'pyopencl[pocl]')"


def variants(queue, q: np.ndarray, k: np.ndarray, scale: float = 1.0):
    """Yield `(run, name)` for each build option and work-group size; `run()` computes and returns `out`."""
    import pyopencl as cl

    rows, nh, d = q.shape
    ng, keys, _ = k.shape
    hpg = nh // ng
    flags = cl.mem_flags
    given = flags.READ_ONLY | flags.COPY_HOST_PTR
    q_buffer = cl.Buffer(queue.context, given, hostbuf=np.ascontiguousarray(q))
    k_buffer = cl.Buffer(queue.context, given, hostbuf=np.ascontiguousarray(k))
    out_buffer = cl.Buffer(queue.context, flags.WRITE_ONLY | flags.ALLOC_HOST_PTR, size=rows * nh * keys * 4)
    arguments = (q_buffer, k_buffer, out_buffer, np.uint32(keys), np.uint32(ng), np.float32(scale))
    for options in OPTIONS:
        constants = [f"-DHPG={hpg}", f"-DD4={d // 4}"]
        program = cl.Program(queue.context, SOURCE).build(constants + options.split())
        for local in LOCAL_SIZES:
            kernel = cl.Kernel(program, "near_scores")
            size = -(-keys // local[0]) * local[0] if local else keys

            def run(kernel=kernel, size=size, local=local) -> np.ndarray:
                kernel(queue, (size, ng, rows), local, *arguments)
                # Mapping is free of copies on this device, and waits for the kernel.
                out, _ = cl.enqueue_map_buffer(
                    queue, out_buffer, cl.map_flags.READ, 0, (rows, ng, keys, hpg), np.float32
                )
                return out

            yield run, f"PoCL {options or 'safe'} local {local[0] if local else 'chosen by PoCL'}"


def near_scores(
    q: np.ndarray, k: np.ndarray, scale: float = 1.0, repeats: int = 5
) -> tuple[Callable[[], np.ndarray], str] | None:
    """PoCL's fastest form of the near scores for these arrays, or None, with a message, without PoCL.

    `q` is float32 [rows][nh][d] and `k` float32 [ng][keys][d]; d a multiple of 4, nh one of ng. The callable
    computes once and returns float32 [rows][ng][keys][hpg], in memory that its next call writes again. The
    name tells the build options and the work-group size that were fastest of all over `repeats` runs each.
    """
    queue = pocl_queue()
    if isinstance(queue, str):
        print(queue, file=sys.stderr)
        return None
    timed = [(best_time(run, repeats), run, name) for run, name in variants(queue, q, k, scale)]
    _, run, name = min(timed, key=lambda entry: entry[0])
    return run, name


def numpy_scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """NumPy's matrix product of the same sizes, in the dtype given: [ng][rows * hpg][keys]."""
    rows, nh, d = q.shape
    ng = k.shape[0]
    by_group = q.reshape(rows, ng, nh // ng, d).transpose(1, 0, 2, 3).reshape(ng, -1, d)
    return by_group @ k.transpose(0, 2, 1)


def best_time(run: Callable[[], object], repeats: int) -> float:
    """The shortest of `repeats` runs in seconds, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the near scores on PoCL and NumPy.")
    for name, value in (("rows", 64), ("keys", 2052), ("groups", 8), ("hpg", 4), ("d", 128), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = parser.parse_args()
    random = np.random.default_rng(0)
    q = random.standard_normal((sizes.rows, sizes.groups * sizes.hpg, sizes.d), dtype=np.float32)
    k = random.standard_normal((sizes.groups, sizes.keys, sizes.d), dtype=np.float32)
    operations = 2 * q.size * sizes.keys

    def report(name: str, seconds: float, deviation: float) -> None:
        print(
            f"{name:44} {seconds * 1e3:9.2f} ms {operations / seconds / 1e9:8.1f} GFLOP/s"
            f"   deviation {deviation:.1e}"
        )

    exact = numpy_scores(q.astype(np.float64), k.astype(np.float64))
    largest = np.abs(exact).max()
    seconds = best_time(lambda: numpy_scores(q, k), sizes.repeats)
    report("NumPy matmul", seconds, np.abs(numpy_scores(q, k) - exact).max() / largest)
    per_key = exact.reshape(sizes.groups, sizes.rows, sizes.hpg, sizes.keys).transpose(1, 0, 3, 2)
    queue = pocl_queue()
    if isinstance(queue, str):
        print(queue)
        return
    for run, name in variants(queue, q, k):
        report(name, best_time(run, sizes.repeats), np.abs(run() - per_key).max() / largest)


if __name__ == "__main__":
    main()
