"""Traces of the o1 system: clean runs do not deviate, planted mistakes are found where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lab
import lab.o1
from lab import resources

# Windows that differ, a ring that wraps, all three paths; head 1 has no far field (its denominator is 0).
SIZES = lab.o1.Sizes(ng=2, hpg=2, d=128, w=40, ns=3, m=5, windows=(0, 33))
CHUNKS = [20, 33, 30, 25, 1, 1, 1, 20, 24]
PATHS = ["chunk", "chunk", "matmul", "matmul", "token", "token", "token", "chunk", "matmul"]
HOW: dict[str, Any] = {"chunks": CHUNKS, "path": PATHS}
Layer = tuple[lab.o1.State, Any, Any, Any]


def layer(seed: int) -> Layer:
    state, q, k, v = lab.o1.example(SIZES, sum(CHUNKS), seed)
    mu = np.asarray(state.mu).copy()
    mu[1] = 0.0
    landmarks = {name: state.arrays[name] for name in ("k_tilde", "q_tilde", "sink_k", "sink_v")}
    return lab.o1.State.fresh(SIZES, mu=mu, **landmarks), q, k, v


@pytest.fixture(scope="module")
def clean() -> tuple[Layer, lab.systems.Trace]:
    """A run of the shipped kernels, whose reference also serves the runs with mistakes."""
    given = layer(4)
    trace = lab.o1.session().trace(*given, **HOW)
    compute, known = trace.reference, {}

    def remembered(of: lab.systems.Trace, chunk: int) -> Any:
        if chunk not in known:
            assert compute is not None
            known[chunk] = compute(of, chunk)
        return known[chunk]

    trace.reference = remembered
    return given, trace


def shipped_source(kernel: str) -> str:
    """The text of the shipped file that has ``kernel``, with what it includes."""
    folder = resources.kernels() / "o1"
    for path in sorted(folder.glob("*.metal")):
        text = path.read_text()
        if f"void {kernel}(" in text:
            return text.replace('#include "o1_common.h"', (folder / "o1_common.h").read_text())
    raise AssertionError(kernel)


def own_lines(kernel: str, text: str) -> slice:
    """Where in ``text`` the kernel stands."""
    start = text.index(f"kernel void {kernel}(")
    return slice(start, text.index("\n}\n", start) + 3)


SLOT = "{ return (head + x) % window; }"
WINDOW = "ring.window = at[3] > 0 ? at[3] : u.w;"
FIRST = "{ return window - len; }"
VISIBLE = "return min(window, len + i + 1);"
EVICTED = "return len + rows > window ? len + rows - window : 0;"

# Kernel, what stands in its text or in what it includes, and what somebody might have written instead.
MISTAKES = [
    ("o1c_far_e", SLOT, "{ return (head + x) % 40; }", "ring index modulo w, not the group's window"),
    ("o1c_far_e", WINDOW, "ring.window = u.w;", "the group's own window overlooked"),
    ("o1c_far_e", FIRST, "{ return window - len + 1; }", "j0 off by one"),
    ("o1c_far_e", "float top = before;", "float top = -INFINITY;", "the stored maximum forgotten"),
    ("o1c_far_e", "u.m + b] * r;", "u.m + b];", "the stored mass not rescaled"),
    ("o1c_score", VISIBLE, "return min(window, len + i);", "a row that does not see itself"),
    ("o1c_score", "+ column) * u.hpg;", "+ column) * u.hpg + u.hpg;", "columns one further"),
    ("o1c_land", "(u.r0 + i) * u.nh", "i * u.nh", "the first row of the chunk forgotten"),
    ("o1c_max", "largest = simd_max(largest);", "", "a missing maximum across the simdgroup"),
    ("o1c_max", "uint c = lane;", "uint c = lane + 1;", "the first column skipped"),
    ("o1c_far", "mixing[a * u.m + b]", "mixing[b * u.m + a]", "landmark indices swapped"),
    ("o1c_far", "gain[b] * s[rescale_at(u, first + b)]", "gain[b]", "gains not rescaled"),
    ("o1c_far", "s[mass_at(u, first + b, i)]", "s[mass_at(u, first + b, u.k - 1)]", "mass of a later row"),
    ("o1c_far", "j <= i; j++", "j < i; j++", "the row's own eviction left out"),
    ("o1c_far", "denominator >= 0.0f", "denominator > 0.0f", "a denominator of zero does not count"),
    ("o1c_far", "float c = nm[row];", "float c = -INFINITY;", "the near maximum left out"),
    ("o1c_soft", "exp(at[c * u.hpg] - far.x)", "exp(at[c * u.hpg])", "exponentials not rescaled"),
    ("o1c_soft", "max(sum + far.y, LEAST_SUM)", "max(sum, LEAST_SUM)", "the far denominator left out"),
    ("o1c_sum", "(columns + PIECES - 1) / PIECES", "columns / PIECES", "the last columns in no piece"),
    ("o1c_sum", "slot + 1 < ring.window", "slot + 1 < u.w", "the ring wraps at w"),
    ("o1c_add", "t_hat[(gh * u.m + b)", "t_hat[(gh / u.hpg * u.m + b)", "numerators by group, not by head"),
    ("o1c_add", "ring.slot(j - j0)", "ring.slot(j)", "evicted values from the wrong slot"),
    ("o1c_far_commit", " * s[rescale_at(u, t)]", "", "numerators not rescaled"),
    ("o1c_far_commit", "ring.slot(j - j0)", "ring.slot(j)", "evicted values from the wrong slot"),
    ("o1c_ring_commit", "ring.slot(ring.len + j)", "ring.slot(j)", "written from the oldest slot on"),
    ("o1c_meta", "at[2] = ring.far + evicted;", "at[2] = evicted;", "the far count starts anew"),
    ("o1c_meta", "at[1] = ring.slot(evicted);", "at[1] = ring.head + evicted;", "head not taken modulo"),
    ("o1c_gather", "ring, u, ring_v, v)[x]", "ring, u, ring_k, v)[x]", "keys in the value panel"),
    ("o1c_gmax", "u.ns + ring.len + i + 1", "u.ns + ring.len + i", "the row itself left out"),
    ("o1c_gsoft", "c < end", "c <= end", "the next row seen"),
    ("o1c_gadd", "sum * inv[row]", "sum", "not divided by the sum"),
    ("o1c_tok_near", "fma(sum[h], keep, weight)", "sum[h] + weight", "the running sum not rescaled"),
    ("o1c_tok_near", "c += STRIPES", "c += SPLITS", "wrong stride of the stripes"),
    ("o1c_tok_far", "mu[(gh * u.m + a) * u.m + lane]", "mu[(gh * u.m + lane) * u.m + a]", "mu transposed"),
    ("o1c_tok_far", "gain * r;", "gain;", "gains not rescaled"),
    ("o1c_tok_merge", "fma(weight, stripe[PART_SUM], sum)", "sum + stripe[PART_SUM]", "sums not rescaled"),
    ("o1c_tok_commit", " * s[rescale_at(u, t)]", "", "numerators not rescaled"),
    ("o1c_tok_commit", "ring.slot(ring.len)", "ring.slot(0) + 1", "written beside the oldest slot"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "right", "wrong"),
    [m[:3] for m in MISTAKES],
    ids=[f"{kernel}: {what}" for kernel, _, _, what in MISTAKES],
)
def test_a_mistake_is_found_at_the_dispatch_that_has_it(
    clean: tuple[Layer, lab.systems.Trace], kernel: str, right: str, wrong: str
) -> None:
    given, reference = clean
    text = shipped_source(kernel)
    where = own_lines(kernel, text)
    mine = text[where]
    changed = (
        text[: where.start] + mine.replace(right, wrong) if right in mine else text.replace(right, wrong)
    )
    if right in mine:
        changed += text[where.stop :]
    assert changed != text, f"{kernel} has no {right!r} any more: plant this mistake anew"
    session = lab.o1.session()
    session.replace(changed, names=kernel)
    trace = session.trace(*given, **HOW)
    trace.reference = lambda of, chunk: reference.expected_of(chunk)
    found = trace.first_deviation()
    assert found is not None
    assert found.kernel == kernel
    assert trace[found.step].replaced
    print(found)
