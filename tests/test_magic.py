"""``%%metal`` and ``%metal`` in an IPython shell of this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import CapturedIO, capture_output

import lab

FILL = "kernel void fill(device int* x, uint i [[thread_position_in_grid]]) { x[i] = N; }\n"


@pytest.fixture(scope="module")
def shell_of_module() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "lab")
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(shell_of_module: InteractiveShell) -> Iterator[InteractiveShell]:
    """A shell with the extension loaded and an empty namespace."""
    shell_of_module.reset()
    yield shell_of_module


def run(shell: InteractiveShell, cell: str) -> tuple[Any, CapturedIO]:
    """Run a cell as a notebook does; its result, and what it showed."""
    with capture_output() as shown:
        result = shell.run_cell(cell)
    return result, shown


def failure(shell: InteractiveShell, cell: str) -> BaseException:
    result, _ = run(shell, cell)
    assert not result.success
    return result.error_in_exec or result.error_before_exec


def filled(shell: InteractiveShell) -> int:
    return shell.user_ns["fill"](mx.zeros(1, mx.int32), grid=1).item()


# ---- the cell ----------------------------------------------------------------------------------------------


def test_kernels_of_a_cell_are_functions_of_the_notebook(shell):
    run(
        shell,
        "%%metal\nkernel void one(device int* x) { x[0] = 1; }\nkernel void two(device int* x) { x[0] = 2; "
        "}\n",
    )
    assert [shell.user_ns[name]([0], grid=1).item() for name in ("one", "two")] == [1, 2]


@pytest.mark.parametrize(
    ("line", "wanted"),
    [("-C n=7", 7), ("-C 0=8", 8), ("-C n={k}", 5), ("-C n=7 -C twice=true", 14), ("-C n=7 -C twice", 14),
     ("-C n=-2 -C twice=False", -2)],
)  # fmt: skip
def test_function_constants_are_given_in_the_line(shell, line, wanted):
    source = (
        "constant int n [[function_constant(0)]]; constant bool twice [[function_constant(1)]];\n"
        "kernel void f(device int* x) { x[0] = is_function_constant_defined(twice) && twice ? 2 * n : n; }\n"
    )
    shell.user_ns["k"] = 5
    result, _ = run(shell, f"%%metal {line}\n{source}")
    assert result.success
    assert shell.user_ns["f"]([0], grid=1).item() == wanted


def test_a_function_constant_without_a_value_says_how_to_give_one(shell):
    source = "constant int n [[function_constant(0)]];\nkernel void f(device int* x) { x[0] = n; }\n"
    assert "in a cell with -C n=..." in str(failure(shell, f"%%metal\n{source}"))
    assert "not 'n=what'" in str(failure(shell, f"%%metal -C n=what\n{source}"))


def test_the_card_is_shown_below(shell):
    _, shown = run(shell, "%%metal -D N=1\n" + FILL)
    (card,) = shown.outputs
    assert set(card.data) == {"text/html", "text/plain"}
    assert "fill" in card.data["text/plain"] and "buffer(0)" in card.data["text/html"]


def test_quiet_shows_nothing(shell):
    result, shown = run(shell, "%%metal --quiet -D N=1\n" + FILL)
    assert result.success
    assert (shown.stdout, shown.outputs) == ("", [])


def test_a_cell_with_one_kernel_compiles_it(shell):
    run(shell, "%%metal -D N=11\n" + FILL)
    assert shell.user_ns["fill"].description is not None


def test_a_cell_may_take_the_place_of_an_earlier_one(shell):
    for n in (1, 2, 1):
        run(shell, f"%%metal -D N={n}\n" + FILL)
        assert filled(shell) == n


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("-D N=7", 7),
        ("-DN=7", 7),
        ("--define N=7", 7),
        ('-D "N=(3 + 4)"', 7),
        ("-D 'N=(3 + 4)'", 7),
        ("-D A=3 -D B=4 -D N=A+B", 7),
        ("-D N={n}", 7),
        ("-D N={n + 1}", 8),
        ("-D N=$n", 7),
        ("-D N", 1),
        ("-D N=7 --math fast", 7),
        ("-D N=7 -e cpu", 7),
        ("-D N=7 --engine auto", 7),
        ("-D N=int{{7}}", 7),
    ],
)
def test_options_reach_the_source(shell, line, wanted):
    shell.user_ns["n"] = 7
    result, _ = run(shell, f"%%metal {line}\n" + FILL)
    assert result.success
    assert filled(shell) == wanted


def test_an_empty_define_is_empty(shell):
    run(shell, "%%metal -D N=7 -D EMPTY=\n" + FILL.replace("N;", "EMPTY N;"))
    assert filled(shell) == 7


def test_a_file_of_helpers_is_read_first(shell, tmp_path):
    folder = tmp_path / "my dir"
    folder.mkdir()
    (folder / "a.metal").write_text("#define N 5\n")
    shell.user_ns["folder"] = folder
    run(shell, '%%metal -I "{folder}/a.metal"\n' + FILL)
    assert filled(shell) == 5


def test_a_name_keeps_the_cell_s_kernels_as_a_library(shell):
    source = (
        "template <class T> kernel void f(device T* x) { x[0] = 3; }\ntemplate kernel void f<int>(device "
        "int*);\n"
    )
    run(shell, "%%metal --name mine\n" + source)
    library = shell.user_ns["mine"]
    assert isinstance(library, lab.Library)
    assert library["f<int>"]([0], grid=1).item() == 3
    assert "f<int>" not in shell.user_ns


def test_a_cell_of_one_line_is_no_path(shell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "int a;").write_text("kernel void f() { }")
    run(shell, "%%metal\nint a;")
    assert "f" not in shell.user_ns


def test_options_are_documented(shell):
    manual = shell.find_cell_magic("metal").__doc__
    assert "%%metal [-e" in manual
    for option in ("--engine", "--define", "--include", "--math", "--name", "--quiet"):
        assert option in manual


# ---- a cell that fails -------------------------------------------------------------------------------------


def test_a_compile_error_fails_the_cell_and_defines_nothing(shell):
    error = failure(shell, "%%metal\nkernel void f(device int* x) {\n    x[0] = y;\n}\n")
    assert isinstance(error, lab.CompileError)
    assert str(error).startswith("cell:3:12: error: use of undeclared identifier 'y'")
    assert "f" not in shell.user_ns


def test_a_compile_error_keeps_the_kernels_of_before(shell):
    run(shell, "%%metal -D N=4\n" + FILL)
    failure(shell, "%%metal\n" + FILL)
    assert filled(shell) == 4


def test_a_name_in_braces_that_is_not_known_is_an_error(shell):
    error = failure(shell, "%%metal -D N={unknown}\n" + FILL)
    assert isinstance(error, UsageError)
    assert str(error) == "{unknown} in the %%metal line is not known to this notebook."


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('-D "N=7', "a quote that does not close"),
        ("--maths fast", "unrecognized arguments: --maths"),
        ("--math quick", "invalid choice: 'quick'"),
        ("-e abacus", "invalid choice: 'abacus'"),
        ("-D N=7 stray", "unrecognized arguments: stray"),
        ("--name 2b", "--name takes a Python name, not '2b'"),
        ("--name class", "--name takes a Python name, not 'class'"),
    ],
)
def test_a_wrong_line_is_told_what_is_wrong(shell, line, words):
    error = failure(shell, f"%%metal {line}\n" + FILL)
    assert isinstance(error, UsageError)
    assert words in str(error)


def test_a_wrong_define_is_told(shell):
    assert "A define needs a name" in str(failure(shell, '%%metal -D "a b=1"\n' + FILL))


def test_a_missing_include_is_told(shell):
    assert "include file nowhere.metal does not exist" in str(
        failure(shell, "%%metal -I nowhere.metal\n" + FILL)
    )


# ---- the line ----------------------------------------------------------------------------------------------


def test_kernels_lists_what_the_notebook_has(shell):
    _, shown = run(shell, "%metal kernels")
    assert "No kernels yet" in shown.stdout
    run(shell, "%%metal -D N=1\n" + FILL)
    _, shown = run(shell, "%metal kernels")
    assert shown.stdout == "<kernel fill(x: device int*)>\n"


def test_source_shows_a_kernel_s_own_lines(shell):
    run(shell, "%%metal -D N=1\n// before\n" + FILL + "// after\n")
    result, _ = run(shell, "%metal source fill")
    assert result.success
    assert result.result.data.strip() == FILL.strip()
    assert result.result.language == "cpp"


@pytest.mark.parametrize("line", ["source nothing", "source", "", "kernel", "kernels now", "engine a b"])
def test_what_the_line_does_not_know_is_told(shell, line):
    error = failure(shell, f"%metal {line}")
    assert isinstance(error, UsageError)
    assert "%metal " in str(error)


def test_engine_tells_and_sets_where_kernels_run(shell):
    _, shown = run(shell, "%metal engine")
    assert shown.stdout == "Kernels of new cells run on cpu (auto).\n"
    _, shown = run(shell, "%metal engine cpu")
    assert shown.stdout == "Kernels of new cells run on cpu.\n"
    run(shell, "%metal engine auto")


def test_an_engine_there_is_not_is_told(shell):
    error = failure(shell, "%metal engine abacus")
    assert isinstance(error, lab.ArgumentError)
    assert "There is no engine called 'abacus'" in str(error)
    _, shown = run(shell, "%metal engine")
    assert shown.stdout == "Kernels of new cells run on cpu (auto).\n"


def test_doctor_says_what_works(shell):
    _, shown = run(shell, "%metal doctor")
    assert "Everything works." in shown.stdout


# ---- into a system -----------------------------------------------------------------------------------------


@pytest.fixture
def o1(shell):
    lab.o1.restore()
    yield lab.o1
    lab.o1.restore()


def test_a_cell_takes_the_place_of_a_system_s_kernel(shell, o1):
    text = o1.default_session().source("o1c_meta").replace("+ u.k", "+ u.k + 0")
    result, shown = run(shell, f"%%metal --into o1\n{text}")
    assert result.success
    assert "o1c_meta" in shown.stdout
    assert "o1c_meta" in o1.default_session().replaced


def test_a_kernel_that_does_not_fit_the_system_is_refused_and_nothing_is_defined(shell, o1):
    error = failure(shell, "%%metal --into o1\nkernel void o1c_meta(device float* meta) { meta[0] = 1; }\n")
    assert isinstance(error, lab.LabError)
    assert "o1c_meta" in str(error)
    assert not o1.default_session().replaced
    assert "o1c_meta" not in shell.user_ns


def test_a_system_that_does_not_exist_is_refused_by_name(shell):
    assert isinstance(failure(shell, "%%metal --into o2\n" + FILL.replace("N", "1")), UsageError)
