"""Sessions: kernels by name, replaced from text, file, library or kernel, refused where they do not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import lab
from lab import systems
from tests.systems import toy

HEAD = "#include <metal_stdlib>\nusing namespace metal;\n"
ARGS = "struct Args { uint n; uint first; float factor; };\n"

# Twice what the shipped one gives, so that it shows which of them ran.
TWICE = f"""{HEAD}{ARGS}
kernel void toy_scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                      constant Args& u [[buffer(2)]], uint i [[thread_position_in_grid]])
{{
    y[i] = 2.0f * u.factor * x[u.first + i];
}}
"""


def results(session: systems.Session, x: np.ndarray, n: int) -> np.ndarray:
    """``out`` after all chunks of ``x``."""
    arrays = toy.arrays(x, n)
    for plan in toy.chunks(x, n):
        session.execute(plan, arrays)
    return np.asarray(arrays["out"])


def expected(x: np.ndarray, n: int, factor: float = 3.0) -> np.ndarray:
    return ((factor * x.reshape(-1, n)) ** 2).cumsum(axis=0).reshape(-1)


X = np.arange(12, dtype=np.float32)


def test_a_plan_runs_in_place_on_the_arrays_given(session: systems.Session) -> None:
    arrays = toy.arrays(X, 4)
    total = arrays["sum"]
    for plan in toy.chunks(X, 4):
        seconds = session.execute(plan, arrays)
        assert len(seconds) == len(plan.dispatches)
    np.testing.assert_array_equal(arrays["out"], expected(X, 4))
    assert arrays["sum"] is total and arrays["count"].item() == 12


def test_scratch_serves_chunks_of_any_length(session: systems.Session) -> None:
    for n in (4, 2, 6, 3):
        np.testing.assert_array_equal(results(session, X, n), expected(X, n))


def test_a_plan_needs_all_its_arrays(session: systems.Session) -> None:
    arrays = toy.arrays(X, 4)
    del arrays["x"]
    with pytest.raises(lab.ArgumentError, match="toy_scale needs the buffer 'x', which was not given"):
        session.execute(toy.plan(4, 0, 12), arrays)


# ---- replacing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["text", "path", "name of a path", "library", "kernel"])
def test_a_kernel_is_replaced_from(form: str, session: systems.Session, tmp_path: Path) -> None:
    file = tmp_path / "mine.metal"
    file.write_text(TWICE)
    sources = {
        "text": TWICE,
        "path": file,
        "name of a path": str(file),
        "library": lab.compile(TWICE),
        "kernel": lab.compile(TWICE).toy_scale,
    }
    replaced = session.replace(sources[form])
    assert tuple(replaced) == ("toy_scale",) and list(session.replaced) == ["toy_scale"]
    assert "2.0f" in session.kernel("toy_scale").source
    assert "2.0f" not in session.shipped("toy_scale").source
    np.testing.assert_array_equal(results(session, X, 4), expected(X, 4, 6.0))


def test_restoring_puts_shipped_kernels_back_one_or_all(session: systems.Session) -> None:
    session.replace(toy.SHIPPED)
    assert set(session.replaced) == {"toy_scale", "toy_add", "toy_out"}
    assert session.restore("toy_add") == ("toy_add",)
    assert set(session.replaced) == {"toy_scale", "toy_out"}
    assert session.restore("toy_add") == ()
    assert set(session.restore()) == {"toy_scale", "toy_out"} and not session.replaced
    np.testing.assert_array_equal(results(session, X, 4), expected(X, 4))
    with pytest.raises(lab.ArgumentError, match=r"toy has no kernel 'toy_ad'\. Did you mean toy_add"):
        session.restore("toy_ad")


def test_sessions_do_not_share_replaced_kernels(toy_system: systems.System) -> None:
    one, other = systems.Session(toy_system), systems.Session(toy_system)
    one.replace(TWICE)
    np.testing.assert_array_equal(results(other, X, 4), expected(X, 4))
    assert "replaced: toy_scale" in repr(one) and "replaced" not in repr(other)


def test_options_of_compile_reach_the_source(session: systems.Session, tmp_path: Path) -> None:
    shared = tmp_path / "args.h"
    shared.write_text(ARGS)
    text = TWICE.replace(ARGS, "").replace("2.0f", "TIMES")
    session.replace(text, include=shared, defines={"TIMES": "4.0f"})
    np.testing.assert_array_equal(results(session, X, 4), expected(X, 4, 12.0))


def test_kernels_of_other_names_are_ignored_and_listed(session: systems.Session) -> None:
    text = TWICE + "kernel void helper(device float* x [[buffer(0)]]) { x[0] = 0.0f; }\n"
    replaced = session.replace(text)
    assert replaced.names == ("toy_scale",) and replaced.ignored == ("helper",)
    told = "toy now runs toy_scale from here. Ignored: helper, which is not a kernel of toy."
    assert str(replaced) == told


def test_only_some_kernels_of_a_source_may_be_taken(session: systems.Session) -> None:
    assert session.replace(toy.SHIPPED, names=["toy_add", "toy_out"]).names == ("toy_add", "toy_out")
    with pytest.raises(lab.ArgumentError, match="no kernel 'toy_sum' in it"):
        session.replace(toy.SHIPPED, names="toy_sum")


def test_a_source_without_any_kernel_of_the_system_is_refused(session: systems.Session) -> None:
    with pytest.raises(lab.ArgumentError, match=r"no kernel 'toy_scales'\. Did you mean toy_scale\?"):
        session.replace(TWICE.replace("toy_scale", "toy_scales"))
    with pytest.raises(lab.ArgumentError, match="There is no kernel in the source"):
        session.replace(HEAD)


def test_all_or_none_of_a_source_is_taken(session: systems.Session) -> None:
    text = toy.SHIPPED.replace("device uint* count", "device int* count")
    with pytest.raises(lab.ArgumentError, match="toy_add"):
        session.replace(text)
    assert not session.replaced


def test_a_shipped_source_comes_in_one_piece_to_be_changed(tmp_path: Path, session: systems.Session) -> None:
    (tmp_path / "args.h").write_text(ARGS)
    head, _, rest = toy.SHIPPED.partition(ARGS)
    path = tmp_path / "toy.metal"
    path.write_text(f'{head}#include "args.h"\n{rest}')
    system = systems.System("toy", (systems.Source(path),), toy.CONTRACTS, toy.TYPES)
    text = systems.Session(system).source("toy_scale")
    assert '"args.h"' not in text and text.count(ARGS) == 1
    session.replace(text.replace("u.factor *", "2.0f * u.factor *"), names="toy_scale")
    np.testing.assert_array_equal(results(session, X, 4), expected(X, 4, 6.0))


# ---- what fits -----------------------------------------------------------------------------------------

FOREIGN = f"""{HEAD}
struct Numbers {{ uint a; uint b; float c; }};
kernel void toy_scale(constant Numbers& numbers [[buffer(2)]], device float4* to [[buffer(1)]],
                      device float4* from [[buffer(0)]], uint i [[thread_position_in_grid]])
{{
    if (4 * i < numbers.a) {{
        to[i] = 2.0f * numbers.c * from[numbers.b / 4 + i];
    }}
}}
"""


@pytest.mark.parametrize(
    ("pointer", "value"),
    [
        ("device float4* from", "from[numbers.b / 4 + i]"),
        ("const device packed_float4* from", "float4(from[numbers.b / 4 + i])"),
        ("device float2* from", "float4(from[numbers.b / 2 + 2 * i], from[numbers.b / 2 + 2 * i + 1])"),
        ("constant float4* from", "from[numbers.b / 4 + i]"),
    ],
)
def test_foreign_names_order_and_vector_types_are_accepted(
    session: systems.Session, pointer: str, value: str
) -> None:
    text = FOREIGN.replace("device float4* from", pointer).replace("from[numbers.b / 4 + i]", value)
    session.replace(text)
    np.testing.assert_array_equal(results(session, X, 4), expected(X, 4, 6.0))


# What is changed in TWICE, and how that is told.
WORDS = "uint n; uint first; float factor;"
REFUSED = {
    "other index": (
        "float* x [[buffer(0)]]",
        "float* x [[buffer(5)]]",
        "it has no buffer(0), where 'x' is bound; buffer(5) 'x' has nothing to be bound to",
    ),
    "missing buffer": (
        ", device float* y [[buffer(1)]]",
        "",
        "it has no buffer(1), where 'y' is bound",
    ),
    "other type": (
        "const float* x",
        "const half* x",
        "buffer(0) 'x' is device const half*, but it holds float32",
    ),
    "integers for floats": (
        "const float* x",
        "const uint* x",
        "buffer(0) 'x' is device const uint*, but it holds float32",
    ),
    "const where it is written": (
        "device float* y",
        "device const float* target",
        "buffer(1) 'target' is device const float*, but 'y' is written",
    ),
    "buffers swapped": (
        "float* x [[buffer(0)]], device float* y",
        "float* y [[buffer(0)]], device float* x",
        "buffer(0) is 'y', where 'x' is bound; buffer(1) is 'x', where 'y' is bound",
    ),
    "threadgroup argument": (
        "uint i [[thread",
        "threadgroup float* t [[threadgroup(0)]], uint i [[thread",
        "threadgroup(0) 't' would need a size, which the plans do not give",
    ),
    "smaller block": (
        WORDS,
        "uint n; float factor;",
        "buffer(2) 'u' is constant Args&, but it is Args of 12 bytes and this Args has 8",
    ),
    "other type in the block": (
        WORDS,
        "uint n; float factor; uint first;",
        "it has uint first in word 1, not float factor",
    ),
    "words of the block swapped": (
        WORDS,
        "uint first; uint n; float factor;",
        "it has n in word 0, not first",
    ),
}


@pytest.mark.parametrize(("was", "becomes", "told"), REFUSED.values(), ids=REFUSED)
def test_a_kernel_that_does_not_fit_is_refused_with_the_difference(
    session: systems.Session, was: str, becomes: str, told: str
) -> None:
    text = TWICE.replace(was, becomes)
    text = text[: text.index("{\n    y[i]")] + "{\n}\n"
    with pytest.raises(lab.ArgumentError) as caught:
        session.replace(text)
    message = str(caught.value)
    assert message.startswith("Kernel 'toy_scale' does not fit toy: ")
    assert told in message
    assert message.endswith(
        "Its buffers in toy are 0 device const float* x, 1 device float* y, 2 constant Args& u."
    )
    assert not session.replaced


# ---- safety --------------------------------------------------------------------------------------------


def test_a_replaced_kernel_runs_guarded_and_its_mistakes_reach_no_array(session: systems.Session) -> None:
    session.replace(toy.SHIPPED.replace("sum[i] += z[i];", "sum[i + (1u << 28)] = z[i];"), names="toy_add")
    arrays = toy.arrays(X, 4)
    with pytest.raises(lab.KernelFault, match="toy_add"):
        session.execute(toy.plan(4, 0, 12), arrays)
    np.testing.assert_array_equal(arrays["sum"], np.zeros(4))


@pytest.mark.parametrize("guarded", [True, False])
def test_guarding_can_be_chosen_for_all_kernels(toy_system: systems.System, guarded: bool) -> None:
    session = systems.Session(toy_system, guarded=guarded)
    session.replace(TWICE)
    arrays = toy.arrays(X, 4)
    total = arrays["sum"]
    session.execute(toy.plan(4, 0, 12), arrays)
    np.testing.assert_array_equal(arrays["sum"], expected(X[:4], 4, 6.0))
    assert (arrays["sum"] is total) is not guarded
