"""The executors on arm64: kernels compiled for it from Metal source, run under an emulator."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import lab
from lab import cache
from lab.engines.cpu import engine as cpu
from lab.engines.cpu.lowering import Site, guard_divisions, inline_what_meets, lower
from lab.engines.cpu.native import inlined
from lab.source import compiler, toolchain
from lab.source.compiler import Target
from tests.engines.divergence import Generator

EMULATOR = "qemu-aarch64"
TARGET = Target("aarch64-linux-musl", "generic")
HERE = Path(__file__).parent
RUNTIME = Path(cpu.__file__).parent
SEEDS = (3, 14, 15, 364, 880, 70)

emulated = pytest.mark.skipif(
    shutil.which(EMULATOR) is None,
    reason=f"{EMULATOR} is not installed (Debian, Ubuntu: apt install qemu-user)",
)

SOURCE = """
#include <metal_stdlib>
using namespace metal;
#define I uint i [[thread_position_in_grid]]
#define T uint t [[thread_index_in_threadgroup]]

kernel void axpy(device const float* x, device float* y, constant float& a, I) { y[i] = a * x[i] + y[i]; }

kernel void arithmetic(device const float* x, device const half* h, device float4* f, device half4* g,
                       device bfloat* b, device long* n, I) {
    const float v = x[i];
    const half w = h[i];
    f[i] = float4(v * v + 1.0f, sqrt(abs(v)) / (v + 3.0f), fma(v, v, v), floor(v * 8) + float(w));
    g[i] = half4(w * w, w / (w + 2.0h), half(v), max(w, 0.5h));
    b[i] = bfloat(v);
    n[i] = long(v * 1000) * 0x100000001l / (long(i) - 7) + (popcount(as_type<uint>(v)) << 3);
}
kernel void functions(device const float* x, device float4* f, I) {
    f[i] = float4(sin(x[i]), exp(x[i]), log(abs(x[i]) + 0.5f), pow(abs(x[i]), 1.5f));
}
kernel void counts(device atomic_uint* count, device atomic_int* most, device const uint* v, I) {
    atomic_fetch_add_explicit(&count[v[i] & 7], 1u, memory_order_relaxed);
    atomic_fetch_max_explicit(most, int(v[i]), memory_order_relaxed);
}

kernel void floats(device const float* x, device float* y, I) {
    const float v = x[i];
    device float* out = y + 16 * i;
    out[0] = simd_sum(v), out[1] = simd_product(v), out[2] = simd_min(v), out[3] = simd_max(v);
    out[4] = simd_prefix_inclusive_sum(v), out[5] = simd_prefix_exclusive_sum(v);
    out[6] = simd_prefix_inclusive_product(v), out[7] = simd_prefix_exclusive_product(v);
    out[8] = simd_shuffle_xor(v, 5), out[9] = simd_broadcast(v, 9), out[10] = simd_broadcast_first(v);
    out[11] = quad_sum(v), out[12] = quad_max(v), out[13] = quad_shuffle_xor(v, 1);
    out[14] = simd_shuffle_rotate_down(v, 3), out[15] = float(simd_sum(half(v)));
}
kernel void integers(device const uint* x, device ulong* y, I) {
    const uint v = x[i];
    device ulong* out = y + 8 * i;
    out[0] = simd_and(v), out[1] = simd_or(v), out[2] = simd_xor(v), out[3] = simd_sum(v);
    out[4] = ulong(simd_ballot(v & 1)), out[5] = simd_min(v) | ulong(simd_max(v)) << 32;
    out[6] = simd_all(v > 5) | simd_any(v > 4000000000u) << 1, out[7] = quad_product(v);
}
// Many values that live across meetings, so that every register is in use when lanes change places.
kernel void registers(device const float* x, device float* y, I) {
    float a[24];
    half4 h = half4(x[i]);
    for (uint j = 0; j < 24; ++j) a[j] = x[i] * (j + 1);
    for (uint k = 0; k < 3; ++k) {
        for (uint j = 0; j < 24; ++j) a[j] += simd_shuffle_xor(a[23 - j], (j & 15) + 1);
        h += half4(simd_max(h.x), 1, 2, 3);
        threadgroup_barrier(mem_flags::mem_none);
    }
    float s = float(h.x + h.y + h.z + h.w);
    for (uint j = 0; j < 24; ++j) s += a[j] * (j & 3);
    y[i] = s;
}
kernel void reversed(device const float* x, device float* y, T, I, uint n [[threads_per_threadgroup]]) {
    threadgroup float s[256];
    s[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = s[n - 1 - t];
}
kernel void reduced(device const float* x, device float* y, threadgroup float* s [[threadgroup(0)]], T, I,
                    uint n [[threads_per_threadgroup]], uint g [[threadgroup_position_in_grid]]) {
    s[t] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint half_ = n / 2; half_ > 0; half_ /= 2) {
        if (t < half_) s[t] += s[t + half_];
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (t == 0) y[g] = s[0];
}
kernel void early(device uint* y, T, I) {
    threadgroup atomic_uint left;
    if (t == 0) atomic_store_explicit(&left, 0, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t % 3 == 0) {
        y[i] = 7;
        return;
    }
    atomic_fetch_add_explicit(&left, 1, memory_order_relaxed);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = atomic_load_explicit(&left, memory_order_relaxed) << 8 | simd_sum(1u);
}
kernel void parted(device uint* y, T, I) {
    y[i] = t;
    if (t < 40)
        threadgroup_barrier(mem_flags::mem_threadgroup);
    else
        threadgroup_barrier(mem_flags::mem_threadgroup);
}
kernel void uneven(device uint* y, T, I) {
    for (uint k = 0; k < 3; ++k) {
        if (t == 33 && k == 1) continue;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = k;
    }
}
kernel void divided(device const int* a, device const int* b, device int* q, I) {
    q[i] = a[i] / b[i] + a[i] % b[i];
}

kernel void stray(device float* y, constant long& by, I) { if (i == 5) y[(long)i + by] = 1; else y[i] = i; }
kernel void stray_meeting(device float* y, constant long& by, I) {
    y[i] = simd_sum(1.0f);
    if (i == 37) y[(long)i + by] = 1;
}
kernel void stray_threadgroup(device float* y, constant int& at, T, I) {
    threadgroup float s[32];
    s[t & 31] = t;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 3) s[at] = 1;
    y[i] = s[t & 31];
}
static float deeper(float x, device float* y) { return x > 1e30f ? x : deeper(x + y[0], y) * 0.5f + 1; }
kernel void recursive(device float* y, I) { y[i] = 0; if (i == 2) y[i] = deeper(0, y); }
kernel void recursive_meeting(device float* y, I) { y[i] = simd_sum(0.0f); if (i == 35) y[i] = deeper(0, y); }
kernel void endless(device float* y, I) { for (;;) y[i] += 1; }
kernel void endless_meeting(device float* y, I) { for (;;) y[i] += simd_sum(1.0f); }
"""


@dataclass(frozen=True)
class Outcome:
    """How a dispatch ended, as the runtime's Job has it, and what its buffers hold."""

    buffers: list[np.ndarray]
    state: int
    signal: int
    group: int
    thread: int
    region: int
    threads: tuple[int, int]
    sites: tuple[Site, ...]
    offset: int  # of the bad address from buffer 0


class Machine:
    """An arm64 program that holds kernels, under the emulator."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        self.folder = folder
        self.alone = alone
        self.library = lab.compile(SOURCE)
        self.sites: dict[str, tuple[Site, ...]] = {}
        self._listed: list[tuple[str, str, int]] = []
        self._objects: list[Path] = []
        for kernel in self.library.values():
            self._add(kernel, kernel.name)
        for seed in SEEDS:
            self._add(self.divergent(seed), f"divergent_{seed}")
        self._program = self._link()

    @staticmethod
    def divergent(seed: int) -> lab.Kernel:
        """The random program of ``seed`` as a kernel on one buffer of words."""
        head, source = "#include <metal_stdlib>\n", Generator(seed).source
        kernel = """
        kernel void divergent(device uint* x, uint i [[thread_position_in_grid]]) { x[i] = program(x[i]); }"""
        return lab.compile(head + source + kernel).divergent

    def _add(self, kernel: lab.Kernel, name: str) -> None:
        """Compile a kernel as the CPU engine does, for the other machine."""
        program = kernel.library.program
        executor = cpu.CpuEngine().executor(program, kernel.signature)
        unit = program.unit(kernel.signature, groups=executor == "loop")
        storage = 0
        if executor == "loop":
            text, _ = compiler.compile_ir(unit, TARGET, "safe")
            text, entry = guard_divisions(text), "groups"
        else:
            raw = ("-Xclang", "-disable-llvm-passes", "-gline-tables-only")
            text, _ = compiler.compile_ir(unit, TARGET, "safe", *raw)
            lowered = lower(inlined(inline_what_meets(guard_divisions(text))))
            text, entry, storage, self.sites[name] = lowered.text, "thread", lowered.storage, lowered.sites
        text = re.sub(rf"@msl_{entry}\b", f"@{entry}_{name}", text)
        text = re.sub(r"^target triple = .*$", "", text, flags=re.MULTILINE)  # `inlined` puts its own there
        source, code = self.folder / f"{name}.ll", self.folder / f"{name}.o"
        source.write_text(text)
        self._clang("-x", "ir", str(source), "-o", str(code))
        self._objects.append(code)
        self._listed.append((name, entry, storage))

    def _clang(self, *arguments: str) -> None:
        done = toolchain.clang([*TARGET.arguments, "-O2", "-c", *arguments])
        assert done.returncode == 0, done.stderr

    def _link(self) -> Path:
        takes = {
            "thread": "const Group*, uint32_t",
            "groups": "const Launch*, uint64_t, uint64_t, volatile uint64_t*",
        }
        declared = "".join(f"void {entry}_{name}({takes[entry]});\n" for name, entry, _ in self._listed)
        rows = "".join(
            f'{{"{name}", .{entry} = {entry}_{name}, .storage = {storage}}},\n'
            for name, entry, storage in self._listed
        )
        header = f"{declared}static const Kernel kernels[] = {{\n{rows}{{0}}}};\n"
        (self.folder / "kernels.h").write_text(header)
        parts = [HERE / "arm64_driver.c", RUNTIME / "fibers.c"]
        options = ["-DALONE", "-fno-builtin"]
        if not self.alone:
            parts, options = [*parts, RUNTIME / "runtime.c"], []
        folders = ["-I", str(RUNTIME), "-I", str(self.folder)]
        for part in parts:
            code = self.folder / f"{part.stem}.o"
            flags = ["-O2", "-fno-sanitize=all", "-fno-stack-protector", *folders, *options]
            self._zig(*flags, "-c", str(part), "-o", str(code))
            self._objects.append(code)
        program = self.folder / "driver"
        options = ["-nostdlib"] if self.alone else []  # to build a C library takes a minute
        self._zig("-static", *options, *map(str, self._objects), "-o", str(program))
        return program

    def _zig(self, *arguments: str) -> None:
        done = toolchain.zig_cc(["-target", TARGET.triple, *arguments], cache.folder() / "zig")
        assert done.returncode == 0, done.stderr

    def run(
        self,
        name: str,
        *buffers: np.ndarray,
        grid: int,
        threadgroup: int = 64,
        shared: int = 0,
        cancel: bool = False,
    ) -> Outcome:
        """One dispatch on copies of ``buffers``."""
        files = [self.folder / f"{name}.{n}" for n in range(len(buffers))]
        for file, buffer in zip(files, buffers, strict=True):
            file.write_bytes(buffer.tobytes())
        command = [EMULATOR, str(self._program), name, *map(str, (grid, threadgroup, shared, int(cancel)))]
        done = subprocess.run(
            [*command, *map(str, files)], capture_output=True, text=True, preexec_fn=_ration_address_space
        )
        assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
        state, signal, group, thread, region, a, b, first, second, offset = map(int, done.stdout.split())
        after = [
            np.frombuffer(f.read_bytes(), x.dtype).reshape(x.shape)
            for f, x in zip(files, buffers, strict=True)
        ]
        sites = tuple(self.sites[name][n] for n in (first, second)) if signal == cpu.UNMET_BARRIER else ()
        return Outcome(after, state, signal, group, thread, region, (a, b), sites, offset)

    def agrees(
        self,
        name: str,
        *buffers: np.ndarray,
        grid: int,
        threadgroup: int = 64,
        shared: int = 0,
        tolerance: float = 0,
    ) -> None:
        """Whether a dispatch leaves in its buffers what this machine's engine leaves there."""
        kernel = (
            self.divergent(int(name.split("_")[1])) if name.startswith("divergent_") else self.library[name]
        )
        outcome = self.run(name, *buffers, grid=grid, threadgroup=threadgroup, shared=shared)
        assert outcome.state == 0
        given = [
            b if b.size > 1 or kernel.signature.writes(p) else b.item()
            for b, p in zip(buffers, kernel.signature.buffers, strict=True)
        ]
        memory = {0: shared} if shared else None
        results = kernel(*given, grid=grid, threadgroup=threadgroup, threadgroup_memory=memory)
        written = [n for n, p in enumerate(kernel.signature.buffers) if kernel.signature.writes(p)]
        for n, result in zip(written, results if len(written) > 1 else [results], strict=True):
            wanted, got = np.asarray(result).view(buffers[n].dtype), outcome.buffers[n]
            if tolerance:
                np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
            else:
                np.testing.assert_array_equal(got, wanted)


def _ration_address_space() -> None:
    # The engine then reserves little around its stacks: the emulator takes seconds for wide ranges.
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))


@pytest.fixture(scope="module", params=["alone", pytest.param("with workers", marks=pytest.mark.slow)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(tmp_path_factory.mktemp("arm64"), alone=request.param == "alone")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """A machine with the engine's own threads, which catch faults."""
    return Machine(tmp_path_factory.mktemp("arm64"), alone=False)


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("target", [
    Target("aarch64-linux-gnu", "generic"),
    Target("arm64-apple-macosx13.0", "apple-m1"),
    Target("x86_64-apple-macosx13.0", "x86-64"),
    Target("x86_64-linux-gnu", "x86-64"),
], ids=lambda target: target.triple)  # fmt: skip
def test_kernels_compile_for_every_machine_the_engine_knows(target):
    program = lab.compile(SOURCE).program
    for name in ("arithmetic", "floats", "counts"):
        text, warnings = compiler.compile_ir(
            program.unit(program.kernels[name], groups=False), target, "safe"
        )
        assert "define" in text and not warnings


@emulated
def test_a_plain_loop_runs(machine, rng):
    machine.agrees("axpy", floats(rng, 1000), floats(rng, 1000), np.array([2.5], np.float32), grid=1000)


@emulated
def test_float_half_bfloat_and_integer_arithmetic_is_the_same_as_here(machine, rng):
    x = floats(rng, 100) * 10
    results = np.zeros((100, 4), np.float32), np.zeros((100, 4), np.float16)
    more = np.zeros(100, np.uint16), np.zeros(100, np.int64)
    outcome = machine.run("arithmetic", x, x.astype(np.float16), *results, *more, grid=100)
    empty = (
        lab.empty((100, 4)),
        lab.empty((100, 4), "float16"),
        lab.empty(100, "bfloat16"),
        lab.empty(100, "int64"),
    )
    here = machine.library.arithmetic(x, x.astype(np.float16), *empty, grid=100)
    import mlx.core as mx

    assert np.array_equal(outcome.buffers[2], here.f)
    assert np.array_equal(outcome.buffers[3], here.g)
    assert np.array_equal(outcome.buffers[4], np.asarray(here.b.view(mx.uint16)))
    assert np.array_equal(outcome.buffers[5], here.n)


@emulated
def test_functions_give_the_same_as_here(machine, rng):
    machine.agrees("functions", floats(rng, 100), np.zeros((100, 4), np.float32), grid=100, tolerance=1e-6)


@emulated
def test_atomics_lose_nothing(machine, rng):
    v = rng.integers(0, 1 << 31, 3000, dtype=np.uint32)
    machine.agrees("counts", np.zeros(8, np.uint32), np.zeros(1, np.int32), v, grid=3000)


@emulated
def test_division_by_zero_and_overflow_go_on(machine, rng):
    a = rng.integers(-1000, 1000, 64, dtype=np.int32)
    b = rng.integers(-5, 5, 64, dtype=np.int32)
    a[:2], b[:2] = np.iinfo(np.int32).min, (-1, 0)
    outcome = machine.run("divided", a, b, np.zeros(64, np.int32), grid=64)
    sure = (b != 0) & ~((a == a[0]) & (b == -1))
    quotient = np.trunc(a[sure] / b[sure]).astype(np.int32)
    assert outcome.state == 0
    assert np.array_equal(outcome.buffers[2][sure], quotient + (a[sure] - b[sure] * quotient))


@emulated
@pytest.mark.parametrize("grid", [64, 77])
def test_collectives_of_floats_are_the_same_as_here(machine, rng, grid):
    machine.agrees("floats", floats(rng, grid), np.zeros((grid, 16), np.float32), grid=grid, tolerance=1e-5)


@emulated
@pytest.mark.parametrize("grid", [64, 77])
def test_collectives_of_integers_are_the_same_as_here(machine, rng, grid):
    x = rng.integers(0, 1 << 32, grid, dtype=np.uint32)
    machine.agrees("integers", x, np.zeros((grid, 8), np.uint64), grid=grid)


@emulated
def test_values_in_registers_live_across_meetings(machine, rng):
    machine.agrees(
        "registers", floats(rng, 96) / 8, np.zeros(96, np.float32), grid=96, threadgroup=96, tolerance=1e-5
    )


@emulated
@pytest.mark.parametrize("seed", SEEDS)
def test_divergent_programs_meet_as_the_rule_says(machine, seed):
    values = np.random.default_rng(seed).integers(0, 1 << 32, 70, dtype=np.uint32)
    outcome = machine.run(f"divergent_{seed}", values, grid=70, threadgroup=70)
    program = Generator(seed)
    wanted = [x for s in (0, 32, 64) for x in program.run([int(v) for v in values[s : s + 32]])]
    assert outcome.state == 0
    assert outcome.buffers[0].tolist() == wanted


@emulated
@pytest.mark.parametrize("threadgroup", [1, 32, 100, 256])
def test_threadgroup_memory_is_shared_across_a_barrier(machine, rng, threadgroup):
    x = floats(rng, 777)
    machine.agrees("reversed", x, np.zeros(777, np.float32), grid=777, threadgroup=threadgroup)


@emulated
def test_given_threadgroup_memory_is_reduced_over_a_thousand_threads(machine, rng):
    x = floats(rng, 4096)
    machine.agrees("reduced", x, np.zeros(4, np.float32), grid=4096, threadgroup=1024, shared=4096)


@emulated
def test_threads_that_returned_are_not_waited_for(machine):
    machine.agrees("early", np.zeros(200, np.uint32), grid=200, threadgroup=100)


@emulated
def test_barriers_in_both_branches_are_told_with_lines_and_threads(machine):
    outcome = machine.run("parted", np.zeros(64, np.uint32), grid=64)
    assert (outcome.state, outcome.signal, outcome.threads) == (cpu.FAULTED, cpu.UNMET_BARRIER, (0, 40))
    assert [site.primitive for site in outcome.sites] == ["__msl_threadgroup_barrier"] * 2
    assert outcome.sites[1].line == outcome.sites[0].line + 2


@emulated
def test_a_barrier_met_in_different_iterations_is_told(machine):
    outcome = machine.run("uneven", np.zeros(64, np.uint32), grid=64)
    assert (outcome.state, outcome.signal, outcome.threads) == (cpu.FAULTED, cpu.UNMET_BARRIER, (0, 33))
    assert outcome.sites[0] == outcome.sites[1]


FAULTS: Sequence[tuple[str, Sequence[np.ndarray], Callable[[Outcome], bool]]] = [
    ("stray", [np.array([1 << 40], np.int64)], lambda o: o.offset == 4 * (5 + (1 << 40))),
    ("stray_meeting", [np.array([1 << 40], np.int64)], lambda o: o.thread == 37),
    (
        "stray_threadgroup",
        [np.array([32], np.int32)],
        lambda o: o.thread == 3 and o.region == cpu.THREADGROUP_MEMORY,
    ),
    ("recursive", [], lambda o: o.region == cpu.STACK_GUARD),
    ("recursive_meeting", [], lambda o: o.thread == 35 and o.region == cpu.STACK_GUARD),
]


@emulated
@pytest.mark.slow
@pytest.mark.parametrize(("name", "more", "told"), FAULTS, ids=[name for name, _, _ in FAULTS])
def test_a_fault_is_caught_and_told(workers, name, more, told):
    outcome = workers.run(name, np.zeros(64, np.float32), *more, grid=64)
    assert outcome.state == cpu.FAULTED and outcome.signal > 0
    assert told(outcome)


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("name", ["endless", "endless_meeting"])
def test_an_endless_loop_is_stopped(workers, name):
    assert workers.run(name, np.zeros(4096, np.float32), grid=4096, cancel=True).state == 2
