"""Traces: what each dispatch wrote, exact rewind, deviations, one record on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lab
from lab import systems
from tests.systems import toy

X = np.arange(12, dtype=np.float32) / 7
KERNELS = ["toy_scale", "square", "toy_add", "toy_out"]


def traced(session: systems.Session, reference: Any = toy.reference) -> systems.Trace:
    trace = systems.Trace("toy", {"n": 4}, {}, reference)
    return systems.record(session, toy.chunks(X, 4), toy.arrays(X, 4), trace)


def planted(session: systems.Session, kernel: str, right: str, wrong: str) -> systems.Session:
    assert right in toy.SHIPPED
    session.replace(toy.SHIPPED.replace(right, wrong), names=kernel)
    return session


def test_a_trace_has_a_step_for_each_dispatch(session: systems.Session) -> None:
    trace = traced(session)
    assert [step.kernel for step in trace] == KERNELS * 3
    assert [step.chunk for step in trace] == [0] * 4 + [1] * 4 + [2] * 4
    assert trace[2].written == ("sum", "count") and trace[1].written == ("z",)
    assert all(step.seconds > 0 and not step.replaced for step in trace)


def test_changed_marks_the_elements_that_are_other_than_before(session: systems.Session) -> None:
    trace = traced(session)
    np.testing.assert_array_equal(trace[7].changed("out"), (np.arange(12) >= 4) & (np.arange(12) < 8))
    # The first element of x is 0, so what it adds changes nothing.
    np.testing.assert_array_equal(trace[2].changed("sum"), [False, True, True, True])
    assert not trace[0].changed("sum").any()


def test_a_trace_leaves_the_arrays_as_they_were(session: systems.Session) -> None:
    arrays = toy.arrays(X, 4)
    systems.record(session, toy.chunks(X, 4), arrays, systems.Trace("toy", {}, {}))
    for name, array in toy.arrays(X, 4).items():
        np.testing.assert_array_equal(arrays[name], array)


def test_rewinding_is_exact(session: systems.Session) -> None:
    trace = traced(session)
    arrays = toy.arrays(X, 4)
    for number, plan in enumerate(toy.chunks(X, 4)):
        back = trace.buffers_at(4 * number)
        for name, array in arrays.items():
            np.testing.assert_array_equal(back[name], array)
        session.execute(plan, arrays)
    end = trace.buffers_at(len(trace))
    for name, array in arrays.items():
        np.testing.assert_array_equal(end[name], array)
    with pytest.raises(lab.ArgumentError, match="12 dispatches: there is no position 13"):
        trace.buffers_at(13)


def test_scratch_is_not_a_number_until_it_is_written(session: systems.Session) -> None:
    trace = traced(session)
    for chunk in range(3):
        before = trace.buffers_at(4 * chunk)
        assert np.isnan(before["y"]).all() and np.isnan(before["z"]).all()


def test_right_kernels_do_not_deviate(session: systems.Session) -> None:
    trace = traced(session)
    assert trace.first_deviation() is None
    assert {d.kernel for d in trace.deviations} == set(KERNELS)
    assert "toy_add" in trace.report() and "beyond" not in trace.report()


def test_the_first_deviation_is_where_the_mistake_is_and_names_the_worst_element(
    session: systems.Session,
) -> None:
    right, wrong = "sum[i] += z[i];", "sum[i] += i == 2 ? 1.5f * z[i] : z[i];"
    trace = traced(planted(session, "toy_add", right, wrong))
    found = trace.first_deviation()
    assert found is not None and found.exceeds
    assert (found.step, found.kernel, found.buffer, found.index, found.where) == (
        2, "toy_add", "sum", (2,), "element 2",
    )  # fmt: skip
    exact = 9 * float(X[2]) ** 2
    assert found.expected == pytest.approx(exact) and found.value == pytest.approx(1.5 * exact, rel=1e-6)
    assert found.absolute == pytest.approx(0.5 * exact, rel=1e-5)
    assert found.relative == pytest.approx(0.5 * exact / (9 * float(X[3]) ** 2), rel=1e-5)
    assert found.ulp > 1e6
    assert str(found).startswith("dispatch 2, toy_add: sum at element 2 is ")
    assert trace[2].replaced and "beyond" in trace.report()


def test_tolerances_can_be_given_for_all_or_by_buffer(session: systems.Session) -> None:
    trace = traced(planted(session, "toy_scale", "u.factor * x", "1.001f * u.factor * x"))
    assert trace.first_deviation().buffer == "y"  # type: ignore[union-attr]
    assert trace.first_deviation(0.01) is None
    assert trace.first_deviation({"y": 0.01}).buffer == "z"  # type: ignore[union-attr]
    assert trace.first_deviation(1e-4).buffer == "y"  # type: ignore[union-attr]


def test_elements_the_reference_leaves_undefined_are_not_compared(session: systems.Session) -> None:
    def lenient(trace: systems.Trace, chunk: int) -> Any:
        found = {kernel: dict(buffers) for kernel, buffers in toy.reference(trace, chunk).items()}
        sums = found["toy_add"]["sum"]
        found["toy_add"]["sum"] = systems.Expected(sums.values, np.arange(4) != 2, sums.magnitude)
        return {"toy_add": found["toy_add"]}

    trace = traced(planted(session, "toy_add", "sum[i] += z[i];", "sum[i] += i == 2 ? 7.0f : z[i];"), lenient)
    assert trace.first_deviation() is None


def test_a_buffer_changed_against_the_contract_is_a_deviation(session: systems.Session) -> None:
    text = toy.SHIPPED.replace("device const float* sum", "device float* sum")
    session.replace(text.replace("out[u.first + i] = sum[i];", "out[u.first + i] = sum[i]; sum[1] = 5.0f;"))
    trace = traced(session)
    found = trace.first_deviation()
    assert found is not None
    assert (found.kernel, found.buffer, found.value) == ("toy_out", "sum", 5.0)
    assert trace[3].written == ("sum", "out")


def test_a_kernel_that_faults_ends_the_trace(session: systems.Session) -> None:
    trace = traced(planted(session, "toy_add", "sum[i] += z[i];", "sum[i + (1u << 28)] = z[i];"))
    assert len(trace) == 3 and trace[2].fault
    found = trace.first_deviation()
    assert found is not None and found.kernel == "toy_add" and found.fault in str(found)
    np.testing.assert_array_equal(trace.buffers_at(3)["sum"], np.zeros(4))


def test_a_trace_without_a_reference_compares_nothing(session: systems.Session) -> None:
    trace = traced(session, None)
    assert trace.deviations == [] and trace.first_deviation() is None
    assert trace[0].expected("y") is None and "not compared" in trace.report()


def test_memory_holds_what_changed_only(session: systems.Session) -> None:
    x = np.arange(400_000, dtype=np.float32)
    plans = toy.chunks(x, 4)[:50]
    trace = systems.record(session, plans, toy.arrays(x, 4), systems.Trace("toy", {}, {}))
    # x and out are 1.6 MB each; a chunk writes five small buffers and a page of out.
    assert trace.nbytes < 2.1 * x.nbytes + 50 * 7 * 2048


def test_a_trace_is_saved_and_loaded_as_one_record(session: systems.Session, tmp_path: Path) -> None:
    trace = traced(planted(session, "toy_scale", "u.factor * x", "1.001f * u.factor * x"))
    folder = trace.save(tmp_path / "kept")
    assert sorted(p.name for p in folder.iterdir()) == ["arrays.npz", "manifest.json"]
    again = systems.Trace.load(folder)
    assert (again.system, again.about, len(again)) == ("toy", {"n": 4}, 12)
    for position in range(len(trace) + 1):
        was, found = trace.buffers_at(position), again.buffers_at(position)
        assert was.keys() == found.keys()
        for name in was:
            np.testing.assert_array_equal(found[name], was[name])
    for old, new in zip(trace, again, strict=True):
        assert (new.dispatch, new.seconds, new.replaced, new.written) == (
            old.dispatch, old.seconds, old.replaced, old.written,
        )  # fmt: skip
        assert new.deviations == old.deviations and new.plan == old.plan
    assert again.first_deviation() == trace.first_deviation()


def test_what_is_not_a_number_survives_in_plain_json(session: systems.Session, tmp_path: Path) -> None:
    trace = traced(planted(session, "toy_scale", "u.factor * x", "NAN * x"))
    found = trace.first_deviation()
    assert found is not None and np.isnan(found.value) and found.roundings == np.inf
    text = (trace.save(tmp_path) / "manifest.json").read_text()
    assert "NaN" not in text and "Infinity" not in text
    again = systems.Trace.load(tmp_path).first_deviation()
    assert again is not None and np.isnan(again.value) and again.roundings == np.inf


def test_loading_says_what_is_wrong_with_a_folder(session: systems.Session, tmp_path: Path) -> None:
    with pytest.raises(lab.ArgumentError, match=r"no manifest\.json"):
        systems.Trace.load(tmp_path)
    traced(session).save(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(lab.ArgumentError, match="format 99; this version reads 1"):
        systems.Trace.load(tmp_path)


def test_a_replaced_kernel_is_compared_with_the_shipped_one_on_the_same_inputs(
    session: systems.Session,
) -> None:
    planted(session, "toy_scale", "u.factor * x", "1.001f * u.factor * x")
    (found,) = systems.compare(session, traced(session))
    assert found.kernel == "toy_scale" and found.elements == 12 and found.differing == 11
    assert found.deviation == pytest.approx(1e-3, rel=1e-2) and found.shipped_deviation < 1e-6
    assert "toy_scale: 1.0e-03 from the reference" in str(found)


def test_elements_are_described_in_the_systems_terms(session: systems.Session) -> None:
    trace = traced(session)
    assert trace[0].describe("out", 7) == ("", "element 7")
    trace.explain = lambda step, buffer, terms: f"of {buffer}"
    assert trace[0].describe("out", (7,)) == ("", "element 7 (of out)")
