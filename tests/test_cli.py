"""``metal-lab`` on the command line."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import mlx.core as mx
import pytest

from lab import cli, doctor, examples
from lab.examples import EXAMPLES


def test_demo_shows_every_example_right(capsys):
    assert cli.main(["demo"]) == 0
    printed = capsys.readouterr().out
    lines = [line for line in printed.split("\n") if line.startswith("ok  ")]
    assert [line.split()[1] for line in lines] == [example.name for example in EXAMPLES]
    assert all(
        re.search(r"error \d\.\de[-+]\d\d of the largest \((≤ \S+|exact)\)  \[cpu, \w+, [\d.]+ ms\]", x)
        for x in lines
    )
    assert "FAIL" not in printed and printed.endswith("Every kernel is right.\n")


def test_demo_takes_a_seed(capsys):
    assert cli.main(["demo", "--seed", "17"]) == 0
    assert "(seed 17)" in capsys.readouterr().out


def test_demo_fails_when_a_kernel_is_wrong(capsys, monkeypatch):
    wrong = dataclasses.replace(EXAMPLES[0], call=lambda kernel, inputs: mx.array(inputs["x"]))
    monkeypatch.setattr(examples, "EXAMPLES", (wrong, EXAMPLES[1]))
    assert cli.main(["demo"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^FAIL  axpy ", printed, re.M) and re.search(r"^ok    stencil ", printed, re.M)
    assert printed.endswith("Some kernel is wrong: `metal-lab doctor` says more.\n")


def test_doctor_tells_versions_engine_and_checks(capsys):
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for word in ("python", "mlx", "numpy", "ziglang", "llvmlite", "cores", "cache", r"engine\s+cpu"):
        assert re.search(rf"^{word}\b", printed, re.M)
    assert printed.count("\nok  ") == len(EXAMPLES)
    assert printed.endswith("Everything works.\n")


def test_doctor_tells_what_does_not_work(capsys, monkeypatch):
    wrong = dataclasses.replace(EXAMPLES[0], call=lambda kernel, inputs: mx.array(inputs["x"]))
    monkeypatch.setattr(examples, "EXAMPLES", (wrong,))
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("Something does not work: see FAIL above.\n")


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["demo", "--seed", "x"]])
def test_a_wrong_command_line_is_told_its_use(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert "usage: metal-lab" in capsys.readouterr().err


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_demo_needs_no_notebook_packages():
    done = run(
        "import sys\n"
        "for name in ('jupyterlab', 'ipywidgets', 'plotly', 'anywidget', 'ipykernel', 'notebook'): "
        "sys.modules[name] = None\n"
        "from lab.cli import main\n"
        "sys.exit(main(['demo']))"
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("package", "command"),
    [("ziglang", "pip install ziglang=="), ("llvmlite", "pip install 'llvmlite")],
)
def test_what_is_missing_is_told_with_the_command_that_installs_it(package, command):
    done = run(
        f"import sys\nsys.modules[{package!r}] = None\nfrom lab.cli import main\nsys.exit(main(['doctor']))"
    )
    assert done.returncode == 1
    assert command in done.stdout and "Traceback" not in done.stderr


def test_a_report_without_checks_is_not_healthy():
    assert not doctor.Report((("python", "3"),), ()).healthy
