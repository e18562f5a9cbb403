"""The examples against their references, and the judge itself."""

from __future__ import annotations

import dataclasses

import mlx.core as mx
import numpy as np
import pytest

import lab
from lab import resources
from lab.examples import EXAMPLES, Example, check

SEEDS = 6


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_an_example_agrees_with_its_reference(example, seed):
    for n in range(SEEDS):
        outcome = check(example, seed + n)
        print(f"seed {seed + n}: {outcome.elements} values, error {outcome.error:.2e}")
        assert outcome.right
        assert outcome.elements > 0


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_a_result_that_is_off_is_judged_wrong(example, seed):
    def off(kernel: lab.Kernel, inputs) -> mx.array:
        out = np.array(example.call(kernel, inputs), np.float64)
        out.flat[-1] += 1e-3 * np.abs(out).max() + 1e-3
        return mx.array(out.astype(np.float32))

    assert not check(dataclasses.replace(example, call=off), seed).right


def test_a_result_that_is_not_finite_is_judged_wrong(seed):
    axpy = EXAMPLES[0]
    wrong = dataclasses.replace(axpy, call=lambda kernel, inputs: mx.array(inputs["x"]) * float("nan"))
    assert not check(wrong, seed).right


def test_a_result_of_another_shape_is_an_error(seed):
    wrong = dataclasses.replace(EXAMPLES[0], call=lambda kernel, inputs: mx.zeros((2, 3, 4)))
    with pytest.raises(AssertionError, match=r"shape \(2, 3, 4\)"):
        check(wrong, seed)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_the_same_seed_draws_the_same_inputs(example, seed):
    first, second = (example.draw(np.random.default_rng(seed)) for _ in range(2))
    assert first.keys() == second.keys()
    for name in first:
        assert np.array_equal(first[name], second[name])


def test_every_file_of_the_folder_is_an_example():
    files = {path.name for path in (resources.kernels() / "examples").glob("*.metal")}
    assert files == {example.file for example in EXAMPLES}


def test_an_example_names_a_kernel_of_its_file():
    def lacks(example: Example) -> bool:
        return example.kernel not in example.library()

    assert [e.name for e in EXAMPLES if lacks(e)] == []
