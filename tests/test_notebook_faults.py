"""Kernels that go wrong, in a real Jupyter kernel: the cell fails in a few words, the notebook lives on."""

from __future__ import annotations

import pytest

from tests.test_notebook import Notebook, Shown, fresh, notebook  # noqa: F401

HEAD = "%%metal --quiet\n#include <metal_stdlib>\nusing namespace metal;\n"
KERNELS = f"""{HEAD}#define I uint i [[thread_position_in_grid]]
kernel void shifted(device float* y, constant long& by, I) {{
    y[i] = i;
    if (i == 5) y[(long)i + by] = 1;
}}
kernel void nowhere(device float* y, I) {{
    device float* p = nullptr;
    p[i] = y[i];
}}
static float deeper(float x, const device float* y) {{
    return x > 1e30f ? x : deeper(x + y[0], y) * 0.5f + 1;
}}
kernel void recursive(device float* y, I) {{ y[i] = deeper(i, y); }}
kernel void spinning(device float* y, I) {{
    for (;;) y[i] = simd_max(y[i]);
}}
kernel void parted(device float* y, uint i [[thread_position_in_threadgroup]]) {{
    if (i < 32)
        threadgroup_barrier(mem_flags::mem_threadgroup);
    else
        threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = i;
}}
kernel void stray(device float* y, constant int& at, uint i [[thread_position_in_threadgroup]]) {{
    threadgroup float s[32];
    s[i + at] = i;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = s[i];
}}
"""

TWIN = "kernel void twin(device float* y) { y[0] = 2; }"


@pytest.fixture
def cells(fresh: Notebook) -> Notebook:  # noqa: F811
    """The notebook with KERNELS defined, and variables that no kernel may touch."""
    assert fresh.run(KERNELS).status == "ok"
    setup = (
        "kept = np.arange(100_000); tensor = mx.arange(1000); mx.eval(tensor); y = mx.ones(64); mx.eval(y)"
    )
    assert fresh.run(setup).status == "ok"
    return fresh


def fails(shown: Shown, kind: str, text: str) -> None:
    """The cell failed with one error of that kind, told without a traceback."""
    assert shown.status == "error"
    assert shown.failure.startswith(f"{kind}: ")
    assert text in shown.failure
    assert "\n" not in shown.failure.strip()
    assert "Traceback" not in shown.failure and ".py" not in shown.failure
    assert shown.text == "" and shown.results == []


def lives(cells: Notebook) -> bool:
    """Whether the notebook's variables are as they were, and its kernels run."""
    check = (
        "bool((kept == np.arange(100_000)).all() and mx.array_equal(tensor, mx.arange(1000)).item() "
        "and (np.asarray(y) == 1).all() and shifted(y, 0, grid=64)[63].item() == 63)"
    )
    shown = cells.run(check)
    return shown.status == "ok" and shown.results[0]["text/plain"] == "True"


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        ("shifted(y, 1 << 32, grid=64)", "KernelFault", "(element 4294967301; it has 64)"),
        ("shifted(y, 59, grid=64)", "KernelFault", "just after its end (element 64; it has 64)"),
        ("shifted(y, -6, grid=64)", "KernelFault", "before its start (element -1; it has 64)"),
        ("nowhere(y, grid=64)", "KernelFault", "through a null pointer"),
        ("recursive(y, grid=64)", "KernelFault", "ran out of stack"),
        ("stray(y, 32, grid=32)", "KernelFault", "threadgroup memory outside the 128 bytes it has"),
        (
            "parted(y, grid=64, threadgroup=64)",
            "KernelFault",
            "thread 0 waits at threadgroup_barrier in cell line",
        ),
        ("shifted(y, 0, grid=4096, threadgroup=2048)", "ArgumentError", "2048"),
        ("shifted(y, grid=64)", "ArgumentError", "'by'"),
        ("shifted(y, 1 << 32, grid=64, isolate=True)", "KernelFault", "(element 4294967301; it has 64)"),
    ],
    ids=lambda value: value if "grid" in value else "",
)
def test_a_cell_whose_kernel_goes_wrong_fails_in_one_sentence(cells, call, kind, text):
    fails(cells.run(call), kind, text)
    assert lives(cells)


def test_the_lines_of_a_barrier_error_are_those_of_the_cell(cells):
    lines = enumerate(KERNELS.split("\n"), 1)
    one, other = (n for n, line in lines if line.startswith("        threadgroup_barrier"))
    shown = cells.run("parted(y, grid=64, threadgroup=64)")
    assert f"thread 0 waits at threadgroup_barrier in cell line {one}," in shown.failure
    assert f"thread 32 at threadgroup_barrier in cell line {other}." in shown.failure


def test_forty_kilobytes_of_threadgroup_memory_fail_in_one_sentence(cells):
    cell = (
        f"{HEAD}kernel void oversize(device float* y, uint i [[thread_position_in_threadgroup]]) {{\n"
        "    threadgroup float s[10240];\n    s[i] = i;\n"
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n    y[i] = s[63 - i];\n}"
    )
    shown = cells.run(cell)
    if shown.status == "ok":  # told at the latest when it is called
        shown = cells.run("oversize(y, grid=64)")
    assert shown.status == "error"
    assert "declares 40960 bytes of threadgroup memory; a threadgroup has at most 32768" in shown.failure
    assert "Traceback" not in shown.failure
    assert lives(cells)


def test_two_kernels_of_one_name_fail_with_the_cell_s_line(cells):
    shown = cells.run(f"{HEAD}kernel void twin(device float* y) {{ y[0] = 1; }}\n{TWIN}")
    assert shown.status == "error"
    assert shown.failure.startswith(
        "cell:5:13: error: two kernels are called 'twin' (the first is in line 4)"
    )
    assert "Traceback" not in shown.failure
    assert cells.run("'twin' in globals()").results[0]["text/plain"] == "False"
    assert lives(cells)


def test_a_kernel_whose_threads_meet_without_end_is_interrupted(cells):
    cells.run("spinning.describe()")
    shown = cells.run_and_interrupt("spinning(y, grid=64)")
    assert shown.status == "error"
    assert "KeyboardInterrupt" in shown.failure
    assert lives(cells)


def test_an_isolated_endless_loop_is_interrupted(cells):
    cells.run("spinning.describe(); shifted(y, 0, grid=64, isolate=True)")
    shown = cells.run_and_interrupt("spinning(y, grid=64, isolate=True)")
    assert shown.status == "error"
    assert "KeyboardInterrupt" in shown.failure
    assert lives(cells)
    shown = cells.run("shifted(y, 0, grid=64, isolate=True)[63].item()")
    assert shown.results[0]["text/plain"] == "63.0"


def test_a_hundred_faults_in_a_row_leave_the_notebook_healthy(cells):
    cells.run(
        "import lab\n"
        "calls = [lambda: shifted(y, 1 << 32, grid=64), lambda: nowhere(y, grid=64),\n"
        "         lambda: recursive(y, grid=64), lambda: parted(y, grid=64, threadgroup=64),\n"
        "         lambda: stray(y, 32, grid=32)]\n"
        "told = 0\n"
        "for n in range(100):\n"
        "    try:\n"
        "        calls[n % 5]()\n"
        "    except lab.KernelFault:\n"
        "        told += 1\n"
    )
    assert cells.run("told").results[0]["text/plain"] == "100"
    assert lives(cells)
