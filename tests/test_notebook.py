"""The magic in a real Jupyter kernel: what a person sees in a notebook."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

PATIENCE = 120  # seconds until a test gives up


@dataclass
class Shown:
    """What one cell showed, and how it ended."""

    status: str = ""
    text: str = ""
    results: list[dict[str, Any]] = field(default_factory=list)
    error: list[str] = field(default_factory=list)

    @property
    def failure(self) -> str:
        """The error as shown, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(self.error))


class Notebook:
    """A running kernel."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self.manager = manager
        self.client = client

    def run(self, cell: str, started: threading.Event | None = None) -> Shown:
        """Run a cell to its end; ``started`` is set when it prints something."""
        shown = Shown()

        def take(message: dict[str, Any]) -> None:
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.text += content["text"]
                if started is not None:
                    started.set()
            elif message["msg_type"] in ("display_data", "execute_result"):
                shown.results.append(content["data"])
            elif message["msg_type"] == "error":
                shown.error = content["traceback"]

        reply = self.client.execute_interactive(cell, timeout=PATIENCE, output_hook=take)
        shown.status = reply["content"]["status"]
        return shown

    def run_and_interrupt(self, call: str) -> Shown:
        """Run a call that never ends, and interrupt it."""
        started = threading.Event()

        def interrupt() -> None:
            started.wait(PATIENCE)
            time.sleep(0.5)  # the launch follows what is printed at once
            self.manager.interrupt_kernel()

        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            return self.run(f"print('started', flush=True)\n{call}", started)
        finally:
            thread.join()


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=PATIENCE)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.fixture
def fresh(notebook: Notebook) -> Notebook:
    """The notebook with the extension loaded and MLX at hand."""
    assert notebook.run("%load_ext lab\nimport mlx.core as mx, numpy as np").status == "ok"
    return notebook


AXPY = """%%metal
#include <metal_stdlib>
using namespace metal;
kernel void axpy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
    constant float& a [[buffer(2)]],
                 uint i [[thread_position_in_grid]])
{
    y[i] = a * x[i] + y[i];
}
"""


def test_a_cell_is_compiled_called_and_shows_its_card(fresh):
    shown = fresh.run(AXPY)
    assert shown.status == "ok"
    (card,) = shown.results
    assert "<table>" in card["text/html"] and "device const float*" in card["text/html"]
    assert "axpy" in card["text/plain"]
    shown = fresh.run("axpy(mx.ones(3), mx.ones(3), 2.0, grid=3).tolist()")
    assert shown.results[0]["text/plain"] == "[3.0, 3.0, 3.0]"


@pytest.mark.parametrize(
    "cell",
    [
        "%%metal\nkernel void f(device float* x) {\n    x[0] = y;\n}",
        "%%metal\nkernel void f(device float* x) {\n    x[0] = ",
    ],
    ids=["wrong", "half typed"],
)
def test_a_compile_error_shows_the_cell_s_own_line_and_nothing_else(fresh, cell):
    shown = fresh.run(cell)
    assert shown.status == "error"
    lines = shown.failure.split("\n")
    assert re.match(r"cell:[23]:\d+: error: ", lines[0])
    assert re.match(r" +[23] \| ", lines[1])
    assert re.match(r" +\| +[~ ]*\^", lines[2])
    assert not re.search(r"Traceback|File \"|/tmp|<stdin>|msl_|\.py", shown.failure)
    assert shown.results == [] and shown.text == ""


def test_a_cell_that_fails_stops_the_cells_queued_after_it(fresh):
    fresh.client.execute("import time; time.sleep(0.5)")  # so that the others wait in the queue
    fresh.client.execute("%%metal\nkernel void f(device float* x) { x[0] = y; }")
    reply = fresh.client.execute_interactive(
        "reached = True", timeout=PATIENCE, output_hook=lambda message: None
    )
    assert reply["content"]["status"] == "aborted"
    assert fresh.run("'reached' in globals()").results[0]["text/plain"] == "False"


def test_an_argument_error_is_one_sentence_without_a_traceback(fresh):
    fresh.run(AXPY)
    shown = fresh.run("axpy(mx.ones(3), mx.ones(3, mx.float16), 2.0, grid=3)")
    assert shown.status == "error"
    assert shown.failure == (
        "ArgumentError: Kernel 'axpy', buffer(1) 'y' takes device float*, got an array of float16, shape "
        "(3,): "
        "use .astype(mx.float32) or, for the same bits, .view(mx.float32)."
    )


def test_a_fault_is_told_and_the_notebook_lives_on(fresh):
    fresh.run("%%metal\nkernel void far(device float* x, constant uint& at) { x[at] = 1; }")
    shown = fresh.run("far(mx.ones(4), 1 << 30, grid=1)")
    assert shown.status == "error"
    assert shown.failure.startswith(
        "KernelFault: Kernel 'far' touched memory that is not its own, nearest to buffer(0) 'x'"
    )
    assert "Traceback" not in shown.failure
    assert (
        fresh.run("far(mx.zeros(4), 2, grid=1).tolist()").results[0]["text/plain"] == "[0.0, 0.0, 1.0, 0.0]"
    )


def test_an_endless_kernel_is_interrupted_and_the_notebook_goes_on(fresh):
    fresh.run(
        "%%metal\nkernel void forever(device float* x, device int* flag, uint i "
        "[[thread_position_in_grid]]) {\n"
        "    while (flag[0] == 0) { x[i] += 1.0f; }\n}"
    )
    fresh.run("kept = mx.arange(4); flag = mx.zeros(1, mx.int32); forever.describe(); mx.eval(kept, flag)")
    shown = fresh.run_and_interrupt("forever(mx.ones(4), flag, grid=4)")
    assert shown.status == "error"
    assert "KeyboardInterrupt" in shown.failure
    assert fresh.run("kept.tolist(), flag.tolist()").results[0]["text/plain"] == "([0, 1, 2, 3], [0])"
    fresh.run(AXPY)
    shown = fresh.run("axpy(mx.ones(3), mx.ones(3), 2.0, grid=3).tolist()")
    assert shown.results[0]["text/plain"] == "[3.0, 3.0, 3.0]"


def test_the_manual_of_the_magic_is_shown(fresh):
    reply = fresh.client.execute_interactive("%%metal?", timeout=PATIENCE)
    manual = reply["content"]["payload"][0]["data"]["text/plain"]
    for option in ("--engine", "--define", "--include", "--math", "--name", "--quiet"):
        assert option in manual


def test_a_kernel_s_buffers_are_in_its_help(fresh):
    fresh.run(AXPY)
    reply = fresh.client.inspect("axpy", 4, reply=True, timeout=PATIENCE)
    assert "buffer(1) y: device float*, written" in reply["content"]["data"]["text/plain"]
