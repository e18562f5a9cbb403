"""Sessions of QSA: any mix of calls and paths, replaced kernels, files of one's own, NaN, notebooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import lab
import lab.qsa
from lab import resources
from lab.qsa import PATHS, Sizes

# 12 query heads a KV head, so that all paths can be taken.
SIZES = Sizes(qh=24, qkv=2, qbudget=41, qch=16, qch2=8, qhg=2, max_cells=160)
TOLERANCE = 2e-6  # of the largest output
FIRST = resources.kernels() / "qsa" / "qsa.metal"
SECOND = Path(__file__).with_name("own_second.metal")
OWN = Sizes(qh=24, qkv=2, qbudget=41, qch=16, qch2=16, qhg=3, max_cells=160)  # the constants of SECOND


@pytest.fixture(autouse=True)
def default_session_as_it_was() -> Iterator[None]:
    yield
    lab.qsa.restore()


def off(out: Any, exact: np.ndarray) -> float:
    """Largest deviation, as a share of the largest output."""
    return float(np.abs(np.asarray(out) - exact).max() / np.abs(exact).max())


def chosen(trace: lab.systems.Trace) -> list[np.ndarray]:
    """The cells that each token of a trace attends to, as the kernels listed them."""
    budget = trace.about["sizes"]["qbudget"]
    steps = [step for step in trace if "ids" in step.dispatch.writes]
    rows = [row for step in steps for row in step.value("ids")]
    return [row[: min(trace.about["cells"] + 1 + i, budget)] for i, row in enumerate(rows)]


# ---- the definition ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("cells", [0, 1, 2, 3, 36, 37, 38, 39, 40, 41, 42, 43, 44, 60, 61, 62, 63])
def test_every_path_gives_the_definition_around_the_budget(path: str, cells: int) -> None:
    cache, *inputs = lab.qsa.example(SIZES, cells, 2, seed=cells)
    trace = lab.qsa.trace(cache, *inputs, path=path)
    assert trace.first_deviation() is None
    exact = lab.qsa.attention(cache, *inputs, ids=chosen(trace))
    assert off(lab.qsa.output(trace), exact) <= TOLERANCE
    for i, selection in enumerate(lab.qsa.selections(trace, 0)):
        np.testing.assert_array_equal(chosen(trace)[i], selection.ids)
        assert selection.everything == (cells + i + 1 <= 41)


@pytest.mark.parametrize("n_tok", range(1, 9))
def test_a_call_may_have_1_to_8_tokens(seed: int, n_tok: int) -> None:
    cache, *inputs = lab.qsa.example(SIZES, 75, n_tok, seed)
    outs = {}
    for path in PATHS:
        trace = lab.qsa.trace(cache, *inputs, path=path)
        assert trace.first_deviation() is None
        outs[path] = lab.qsa.output(trace)
        assert outs[path].shape == (n_tok, 24, 256)
        assert off(outs[path], lab.qsa.attention(cache, *inputs, ids=chosen(trace))) <= TOLERANCE
    assert off(outs["v1"], outs["v2"]) <= TOLERANCE and off(outs["v3"], outs["v2"]) <= TOLERANCE


@pytest.mark.parametrize("path", ["v1", "v2", "v3"])
def test_more_blocks_than_registers_hold_are_selected_from(path: str) -> None:
    sizes = Sizes(qh=12, qkv=1, qbudget=203, max_cells=16 * 1024 + 60)
    cache, *inputs = lab.qsa.example(sizes, 16 * 1024 + 50, 2)
    trace = lab.qsa.trace(cache, *inputs, path=path)
    assert trace.first_deviation() is None
    assert off(lab.qsa.output(trace), lab.qsa.attention(cache, *inputs, ids=chosen(trace))) <= TOLERANCE


def test_the_shipped_constants_give_the_definition(seed: int) -> None:
    sizes = Sizes()
    cache, *inputs = lab.qsa.example(sizes, 2100, 2, seed)
    for path in PATHS:
        trace = lab.qsa.trace(cache, *inputs, path=path)
        assert off(lab.qsa.output(trace), lab.qsa.attention(cache, *inputs, ids=chosen(trace))) <= TOLERANCE


def test_with_room_for_everything_it_is_attention_over_the_8_bit_cache(seed: int) -> None:
    cache, *inputs = lab.qsa.example(SIZES, 38, 3, seed)
    exact = lab.qsa.attention(cache, *inputs)
    full = lab.qsa.full_attention(cache, *inputs)
    out = lab.qsa.run(cache, *inputs)
    assert off(out, exact) <= TOLERANCE and TOLERANCE < off(out, full) < 0.05


def test_many_equal_scores_are_cut_at_the_lower_blocks() -> None:
    cache, qfull, qcur, k, v = lab.qsa.example(SIZES, 0, 8)
    ones = np.ones((100, 2, 256), np.float32)
    cache.append(ones, np.asarray(ones))
    for path in PATHS:
        trace = lab.qsa.trace(cache, qfull, qcur, k, v, path=path)
        assert trace.first_deviation() is None
        # Token 0 sees 101 cells: of the unfinished block one, of equal others the lowest 40.
        assert chosen(trace)[0].tolist() == [*range(40), 100]


# ---- calls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_how_tokens_come_in_calls_does_not_matter(seed: int, path: str) -> None:
    cache, *inputs = lab.qsa.example(SIZES, 50, 19, seed)
    ends = []
    for tokens in (None, 1, 3, [8, 1, 7, 3], 8):
        mine = cache.copy()
        out = lab.qsa.run(mine, *inputs, tokens=tokens, path=path)
        assert out.shape == (19, 24, 256) and out.dtype == mx.float32 and mine.cells == 69
        ends.append((np.asarray(out), *(np.asarray(mine.arrays[n]) for n in ("kq", "vq", "ksc", "vsc"))))
    for end in ends[1:]:
        for one, other in zip(end, ends[0], strict=True):
            np.testing.assert_array_equal(one, other)


def test_paths_may_be_mixed_and_tokens_come_in_parts(seed: int) -> None:
    cache, *inputs = lab.qsa.example(SIZES, 50, 19, seed)
    whole = lab.qsa.run(cache.copy(), *inputs)
    outs = []
    for part, path in ((slice(0, 9), ["v1", "v3"]), (slice(9, 9), "v2"), (slice(9, 19), ["v2", "v1"])):
        outs.append(lab.qsa.run(cache, *(x[part] for x in inputs), path=path))
    assert [out.shape[0] for out in outs] == [9, 0, 10] and cache.cells == 69
    assert off(mx.concatenate(outs), np.asarray(whole)) <= TOLERANCE


def test_a_run_ends_as_a_trace_does_bit_for_bit_and_stays_on_its_arrays(seed: int) -> None:
    cache, *inputs = lab.qsa.example(SIZES, 50, 19, seed)
    how: dict[str, Any] = {"tokens": [8, 8, 3], "path": ["v1", "v2", "v3"]}
    trace = lab.qsa.trace(cache, *inputs, **how)
    assert cache.cells == 50, "tracing leaves the cache alone"
    arrays = dict(cache.arrays)
    out = lab.qsa.run(cache, *inputs, **how)
    np.testing.assert_array_equal(out, lab.qsa.output(trace))
    for name, array in arrays.items():
        assert cache.arrays[name] is array
        np.testing.assert_array_equal(array, trace.buffers_at(len(trace))[name])
    appended = [np.asarray(x[50:]) for x in cache.floats]
    np.testing.assert_array_equal(appended[0], inputs[2])
    np.testing.assert_array_equal(appended[1], inputs[3])


def test_inputs_may_be_numpy_arrays_of_any_float_dtype() -> None:
    cache, *inputs = lab.qsa.example(SIZES, 50, 3)
    other = cache.copy()
    halves = [np.asarray(x).astype(np.float16) for x in inputs]
    out = lab.qsa.run(cache, *halves)
    again = lab.qsa.run(other, *(mx.array(x).astype(mx.float32) for x in halves))
    np.testing.assert_array_equal(out, again)


def test_wrong_inputs_are_refused_before_anything_runs() -> None:
    cache, qfull, qcur, k, v = lab.qsa.example(SIZES, 150, 12)
    few = [x[:4] for x in (qfull, qcur, k, v)]
    with pytest.raises(
        lab.ArgumentError, match=r"qfull has the shape \(4, 24, 256\); it takes \(4, 24, 512\)"
    ):
        lab.qsa.run(cache, few[1], *few[1:])
    with pytest.raises(lab.ArgumentError, match=r"v has the shape \(12, 2, 256\); it takes \(4, 2, 256\)"):
        lab.qsa.run(cache, *few[:3], v)
    with pytest.raises(lab.ArgumentError, match="The key of token 1 is inf at KV head 0, dimension 3"):
        spoilt = np.asarray(few[2]).copy()
        spoilt[1, 0, 3] = np.inf
        lab.qsa.run(cache, few[0], few[1], spoilt, few[3])
    with pytest.raises(lab.ArgumentError, match="max_cells = 160 cells: 150 are there, 12 more do not fit"):
        lab.qsa.run(cache, qfull, qcur, k, v)
    with pytest.raises(lab.ArgumentError, match="There is no path 'v4'"):
        lab.qsa.run(cache, *few, path="v4")
    with pytest.raises(lab.ArgumentError, match="There is no engine called 'gpu'"):
        lab.qsa.session("gpu")
    assert cache.cells == 150 and not np.asarray(cache.kq)[150:].any()


# ---- NaN -----------------------------------------------------------------------------------------------


def broken_scores(value: str, where: str) -> str:
    """The shipped file, its score kernel writing ``value`` for blocks ``where``."""
    text, right = FIRST.read_text(), "*score = best;"
    assert right in text
    return text.replace(right, f"*score = {where} ? {value} : best;")


@pytest.mark.parametrize("path", PATHS)
def test_scores_that_are_nan_are_refused_between_score_and_selection(path: str) -> None:
    cache, *inputs = lab.qsa.example(SIZES, 100, 4)
    session = lab.qsa.session()
    session.replace(broken_scores("NAN", "t == 2 && block >= 17 && block < 20"), "qsa_score")
    told = (
        "Kernel 'qsa_score' gave NaN as the score of block 17 (cells 68 to 71) for token 2, the first of 3 "
        "such scores: NaN has no place in an order, so nothing is selected."
    )
    with pytest.raises(lab.KernelFault) as caught:
        session.run(cache, *inputs, path=path)
    assert str(caught.value) == told
    assert cache.cells == 100, "no token has been attended to"
    trace = session.trace(cache, *inputs, path=path)
    found = trace.first_deviation()
    assert found is not None and (found.kernel, found.fault) == ("qsa_score", told)
    assert len(trace) == 3 and np.isnan(trace[2].value("scores")[2, 17])
    with pytest.raises(lab.ArgumentError, match="Call 0 has no scores to select by: Kernel"):
        lab.qsa.selections(trace, 0)


def test_a_block_without_a_score_is_found_in_a_trace() -> None:
    cache, *inputs = lab.qsa.example(SIZES, 101, 1)  # 102 cells, of which the unfinished block has two
    session = lab.qsa.session()
    text = FIRST.read_text()
    assert "block == n_kv / 4 && lane == 0" in text
    session.replace(text.replace("block == n_kv / 4 && lane == 0", "false"), "qsa_score")
    found = session.trace(cache, *inputs).first_deviation()
    assert found is not None
    assert found.fault.startswith(
        "Kernel 'qsa_score' gave NaN as the score of block 25 (cells 100 to 103) for token 0: "
    )


def test_tokens_of_earlier_calls_stay_when_a_later_one_fails(seed: int) -> None:
    cache, *inputs = lab.qsa.example(SIZES, 100, 6, seed)
    session = lab.qsa.session()
    session.replace(broken_scores("NAN", "n_kv == 105"), "qsa_score")
    with pytest.raises(lab.KernelFault, match=r"block 0 .* for token 0, the first of 26 such scores"):
        session.run(cache, *inputs, tokens=2)
    assert cache.cells == 104
    session.restore()
    rest = session.run(cache, *(x[4:] for x in inputs))
    again, *_ = lab.qsa.example(SIZES, 100, 6, seed)
    np.testing.assert_array_equal(rest, session.run(again, *inputs)[4:])


# ---- replacing -----------------------------------------------------------------------------------------


def test_a_second_file_of_one_s_own_works_unmodified(seed: int) -> None:
    session = lab.qsa.session()
    names = session.replace(SECOND, include=FIRST).names
    assert names == ("qsa_topk2", "qsa_attn2", "qsa_merge2"), "the first file's kernels are the shipped ones"
    for cells in (30, 95):
        cache, *inputs = lab.qsa.example(OWN, cells, 3, seed)
        trace = session.trace(cache, *inputs)
        assert trace.first_deviation() is None
        assert [s.replaced for s in trace] == [False] * 3 + [True] * 3
        exact = lab.qsa.attention(cache, *inputs, ids=chosen(trace))
        assert off(session.run(cache, *inputs), exact) <= TOLERANCE


def test_a_second_file_with_other_constants_than_the_sizes_does_not_run() -> None:
    session = lab.qsa.session()
    session.replace(SECOND, include=FIRST)
    cache, *inputs = lab.qsa.example(SIZES, 60, 3)
    for call in (session.run, session.trace):
        with pytest.raises(lab.ArgumentError) as caught:
            call(cache, *inputs)
        assert str(caught.value) == (
            "The source of qsa_topk2 has QCH2 = 16 and QHG = 3, where the sizes have 8 and 2: "
            "use Sizes(qch2=16, qhg=3)."
        )
    assert cache.cells == 60
    session.run(cache, *inputs, path="v1")  # which does without it


def test_a_second_file_follows_the_other_constants_of_any_sizes(seed: int) -> None:
    session = lab.qsa.session()
    session.replace(SECOND, include=FIRST)
    for changed in ({"qh": 6, "qkv": 1, "qbudget": 33}, {"qh": 18, "qkv": 6, "max_cells": 90}):
        sizes = Sizes(**{"qbudget": 41, "qch2": 16, "qhg": 3, "max_cells": 160, **changed})
        cache, *inputs = lab.qsa.example(sizes, 60, 3, seed)
        assert session.trace(cache, *inputs).first_deviation() is None


def test_shipped_files_may_be_replaced_as_they_are(seed: int) -> None:
    session = lab.qsa.session()
    assert len(session.replace(FIRST)) == 5
    assert len(session.replace(resources.kernels() / "qsa" / "qsa2.metal", include=FIRST)) == 4
    assert set(session.replaced) == set(lab.qsa.CONTRACTS)
    cache, *inputs = lab.qsa.example(SIZES, 60, 3, seed)
    for path in PATHS:
        np.testing.assert_array_equal(
            session.run(cache.copy(), *inputs, path=path), lab.qsa.run(cache.copy(), *inputs, path=path)
        )
    assert set(session.restore()) == set(lab.qsa.CONTRACTS)


def test_a_kernel_that_does_not_fit_is_refused_with_the_difference() -> None:
    text = SECOND.read_text().replace("device int* out", "device uint* out")
    text = text.replace("device int* mine = out", "device uint* mine = out")
    with pytest.raises(lab.ArgumentError) as caught:
        lab.qsa.replace(text, include=FIRST)
    assert str(caught.value) == (
        "Kernel 'qsa_topk2' does not fit qsa: buffer(1) 'out' is device uint*, but 'ids' holds int32. "
        "Its buffers in qsa are 0 device const float* scores, 1 device int* ids, 2 constant QsaArgs& args."
    )


def test_the_module_speaks_of_a_default_session() -> None:
    cache, *inputs = lab.qsa.example(SIZES, 60, 2)
    other = lab.qsa.session()
    right = "qsa_write_prepared(y / (1.0f + exp(-gate))"
    assert right in FIRST.read_text()
    lab.qsa.replace(FIRST.read_text().replace(right, "qsa_write_prepared(y"), "qsa_merge")
    assert list(lab.qsa.default_session().replaced) == ["qsa_merge"] and not other.replaced
    found = lab.qsa.trace(cache, *inputs, path="v1").first_deviation()
    assert found is not None and found.kernel == "qsa_merge"
    (compared,) = lab.qsa.compare(cache, *inputs, path="v1")
    assert compared.kernel == "qsa_merge" and compared.deviation > 0.1 > 1e-6 > compared.shipped_deviation
    assert compared.elements == 2 * 24 * 256
    assert other.trace(cache, *inputs, path="v1").first_deviation() is None
    assert lab.qsa.restore("qsa_merge") == ("qsa_merge",)
    assert lab.qsa.trace(cache, *inputs, path="v1").first_deviation() is None


# ---- in a notebook -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "lab")
    yield shell
    InteractiveShell.clear_instance()


def cell(shell: InteractiveShell, text: str) -> str:
    with capture_output() as shown:
        shell.run_cell(text).raise_error()
    return shown.stdout


def test_a_cell_with_a_second_file_goes_into_the_system_from_any_folder(
    shell: InteractiveShell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = cell(shell, f"%%metal --into qsa -I kernels/qsa/qsa.metal\n{SECOND.read_text()}")
    assert told.strip() == "qsa now runs qsa_topk2, qsa_attn2, qsa_merge2 from here."
    cache, *inputs = lab.qsa.example(OWN, 60, 2)
    trace = lab.qsa.trace(cache, *inputs)
    assert trace.first_deviation() is None and trace[3].replaced
    with pytest.raises(lab.ArgumentError, match="has QCH2 = 16 and QHG = 3, where the sizes have 32 and 2"):
        lab.qsa.run(*lab.qsa.example(Sizes(), 10, 1))


def test_a_define_of_the_cell_counts_as_the_source_s_own(shell: InteractiveShell) -> None:
    second = (resources.kernels() / "qsa" / "qsa2.metal").read_text()
    cell(shell, f"%%metal --into qsa -I kernels/qsa/qsa.metal -D QCH2=4\n{second}")
    cache, *inputs = lab.qsa.example(SIZES, 60, 2)
    with pytest.raises(lab.ArgumentError, match=r"has QCH2 = 4, where the sizes have 8: use Sizes\(qch2=4\)"):
        lab.qsa.run(cache, *inputs)
    cache, *inputs = lab.qsa.example(Sizes(qbudget=41, qch2=4, max_cells=160), 60, 2)
    assert lab.qsa.trace(cache, *inputs).first_deviation() is None
