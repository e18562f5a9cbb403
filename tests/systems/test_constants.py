"""Plans with constants: kernels compiled for them, replaced ones too; sources that define them otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lab
from lab import systems
from tests.systems import twins


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> systems.System:
    return twins.system(tmp_path_factory.mktemp("twins"))


@pytest.fixture
def session(system: systems.System) -> systems.Session:
    return systems.Session(system)


def first_file(system: systems.System) -> Path:
    return system.sources[0].path


def out(session: systems.Session, **defines: int) -> list[float]:
    arrays = twins.arrays()
    session.execute(twins.plan(**defines), arrays)
    return np.asarray(arrays["out"]).tolist()


def second(plus: str = "", change: str = "out[i] = a[i]") -> str:
    """The second file as somebody else has it: PLUS defined unconditionally, or, if empty, not at all."""
    guarded = twins.SECOND[: twins.SECOND.index("kernel")]
    define = f"#define PLUS {plus}\n" if plus else guarded
    return define + twins.SECOND.removeprefix(guarded).replace("out[i] = a[i]", change)


# ---- compiled for a plan's constants -------------------------------------------------------------------


def test_a_kernel_runs_on_two_sets_of_buffers(session: systems.Session) -> None:
    arrays = twins.arrays()
    session.execute(twins.plan(first=1), arrays)
    assert np.asarray(arrays["a"]).tolist() == [0, 2, 4, 6, 0]
    assert np.asarray(arrays["b"]).tolist() == [0, 200, 400, 600, 0]


def test_kernels_are_compiled_for_the_plan_s_constants_each_once(session: systems.Session) -> None:
    assert out(session) == twins.expected(2, 10)
    assert out(session, TIMES=3) == twins.expected(3, 10)
    assert out(session, TIMES=3, PLUS=4) == twins.expected(3, 4)
    assert out(session) == twins.expected(2, 10)
    one = session.kernel("twins_scale", {"TIMES": 3, "PLUS": 4})
    assert one is session.kernel("twins_scale", {"TIMES": 3, "PLUS": 5}), "the first file has no PLUS"
    assert one is not session.kernel("twins_scale", {"TIMES": 4})


def test_shipped_kernels_of_every_constant_run_in_place(session: systems.Session) -> None:
    arrays = twins.arrays()
    before = dict(arrays)
    session.execute(twins.plan(TIMES=5), arrays)
    assert all(arrays[name] is before[name] for name in before)


def test_constants_survive_in_a_saved_trace(session: systems.Session, tmp_path: Path) -> None:
    trace = systems.record(session, [twins.plan(TIMES=3)], twins.arrays(), systems.Trace("twins", {}, {}))
    assert trace.buffers_at(3)["out"].tolist() == twins.expected(3, 10)
    again = systems.Trace.load(trace.save(tmp_path))
    assert dict(again.chunks[0].plan.defines) == {"TIMES": 3} and again.chunks[0].plan == trace.chunks[0].plan


# ---- replaced kernels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "library", "kernel", "file"])
def test_a_replacement_is_compiled_anew_for_other_constants(
    session: systems.Session, system: systems.System, form: str, tmp_path: Path
) -> None:
    text = second(change="out[i] = 1000 + a[i]")
    if form == "text":
        session.replace(text, include=first_file(system))
    elif form == "file":
        (tmp_path / "mine.metal").write_text(text)
        session.replace(tmp_path / "mine.metal", include=first_file(system))
        (tmp_path / "mine.metal").unlink()  # what was taken is kept
    else:
        library = lab.compile(text, include=first_file(system))
        session.replace(library if form == "library" else library.twins_add)
    for times, plus in ((2, 10), (3, 10), (3, 4)):
        wanted = [1000 + x for x in twins.expected(times, plus)]
        assert out(session, TIMES=times, PLUS=plus) == wanted
    assert session.restore() == ("twins_add",)
    assert out(session, TIMES=3) == twins.expected(3, 10)


def test_a_kernel_replaced_again_is_the_newer_one(session: systems.Session, system: systems.System) -> None:
    for more in (1000, 2000):
        session.replace(second(change=f"out[i] = {more} + a[i]"), include=first_file(system))
        assert out(session, TIMES=3)[0] == more + 30


def test_kernels_of_included_files_are_no_replacements(
    session: systems.Session, system: systems.System
) -> None:
    assert session.replace(second(), include=first_file(system)).names == ("twins_add",)
    text = f'#include "{first_file(system)}"\n' + second()
    assert session.replace(text).names == ("twins_add",)
    assert list(session.replaced) == ["twins_add"]
    with pytest.raises(lab.ArgumentError, match=r"those of the files it includes \('twins_scale'\) are left"):
        session.replace("\n", include=first_file(system))


def test_an_included_kernel_can_be_asked_for_by_name(
    session: systems.Session, system: systems.System
) -> None:
    assert session.replace(second(), "twins_scale", include=first_file(system)).names == ("twins_scale",)


def test_a_file_of_one_s_own_may_be_included_with_its_kernels(
    session: systems.Session, tmp_path: Path
) -> None:
    (tmp_path / "own.h").write_text(twins.FIRST.replace("TIMES * x", "TIMES * x + 1"))
    (tmp_path / "own.metal").write_text('#include "own.h"\n' + second())
    assert session.replace(tmp_path / "own.metal").names == ("twins_scale", "twins_add")
    assert out(session, TIMES=3)[0] == 31


@pytest.mark.parametrize("value", ["4", "(4)", "0x4", "+4", "FOUR"])
def test_a_source_may_define_the_plan_s_constants_as_they_are(
    session: systems.Session, system: systems.System, value: str
) -> None:
    session.replace("#define FOUR 4\n" + second(value), include=first_file(system))
    assert out(session, TIMES=3, PLUS=4) == twins.expected(3, 4)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("4", "has PLUS = 4, where the sizes have 10: use Sizes(plus=4)."),
        ("-4", "has PLUS = -4, where the sizes have 10: use Sizes(plus=-4)."),
        ("(2 + 8)", "has PLUS = (2 + 8), where the sizes have 10: these have to be plain numbers."),
    ],
)
def test_a_source_that_defines_a_constant_as_something_else_does_not_run(
    session: systems.Session, system: systems.System, value: str, told: str
) -> None:
    session.replace(second(value), include=first_file(system))
    arrays = twins.arrays()
    with pytest.raises(lab.ArgumentError) as caught:
        session.execute(twins.plan(TIMES=3, PLUS=10), arrays)
    assert str(caught.value) == f"The source of twins_add {told}"
    assert not np.asarray(arrays["a"]).any(), "nothing has run"
    with pytest.raises(lab.ArgumentError, match="The source of twins_add has PLUS"):
        systems.record(session, [twins.plan(PLUS=10)], arrays, systems.Trace("twins", {}, {}))


def test_a_define_that_a_source_was_compiled_with_counts_as_its_own(
    session: systems.Session, system: systems.System
) -> None:
    session.replace(second(), include=first_file(system), defines={"PLUS": 4, "TIMES": 7})
    with pytest.raises(lab.ArgumentError) as caught:
        out(session, TIMES=3, PLUS=10)
    assert str(caught.value) == (
        "The source of twins_add has TIMES = 7 and PLUS = 4, where the sizes have 3 and 10: "
        "use Sizes(times=7, plus=4)."
    )
    assert out(session, TIMES=7, PLUS=4) == twins.expected(7, 4)


# ---- numbers, and what the host refuses ----------------------------------------------------------------


def test_a_number_of_another_type_is_refused(session: systems.Session) -> None:
    text = twins.FIRST.replace("constant uint& first", "constant float& first").replace(
        "[first +", "[uint(first) +"
    )
    with pytest.raises(lab.ArgumentError) as caught:
        session.replace(text)
    assert "buffer(2) 'first' is constant float&, but it is a uint." in str(caught.value)
    assert str(caught.value).endswith("2 constant uint& first.")


def test_results_that_the_system_refuses_are_a_fault(
    session: systems.Session, system: systems.System
) -> None:
    session.replace(second(change="out[i] = i == 2 ? -1e6f : a[i]"), include=first_file(system))
    with pytest.raises(lab.KernelFault, match=r"^twins_add gave -1000000\.0 for element 2\.$"):
        out(session)
    trace = systems.record(session, [twins.plan()] * 2, twins.arrays(), systems.Trace("twins", {}, {}))
    assert len(trace) == 3, "the trace ends there"
    found = trace.first_deviation()
    assert found is not None and (found.step, found.fault) == (2, "twins_add gave -1000000.0 for element 2.")
    assert trace[2].value("out")[2] == -1000000.0, "what was refused can be seen"


def test_a_plan_may_have_inputs_of_its_own(session: systems.Session) -> None:
    start = twins.arrays()
    inputs = [{"x": start["x"]}, {"x": 10 * start["x"]}]
    del start["x"]
    trace = systems.record(session, [twins.plan()] * 2, start, systems.Trace("twins", {}, {}), inputs)
    assert trace[0].value("x").tolist() == [1, 2, 3] and trace[3].value("x").tolist() == [10, 20, 30]
    assert trace.buffers_at(6)["a"].tolist() == [0, 20, 40, 60, 0]
