"""Plans are data: they survive being written down, and print as a table."""

from __future__ import annotations

import json

import numpy as np

from lab import systems
from tests.systems import toy


def test_dispatches_survive_json() -> None:
    for dispatch in toy.plan(5, 3).dispatches:
        told = json.loads(json.dumps(dispatch.as_record()))
        assert systems.Dispatch.from_record(told) == dispatch


def test_a_dispatch_takes_the_constants_that_its_kernel_takes() -> None:
    contract = systems.Contract("f", ("x", "n"), ("x",))
    assert contract.dispatch({"n": 4, "m": 5}, grid=(4, 1, 1)).constants == {"n": 4}


def test_a_block_packs_its_words_in_order() -> None:
    packed = toy.ARGS.pack({"factor": 2.5, "n": 7})
    assert packed == np.array([7, 0], np.uint32).tobytes() + np.float32(2.5).tobytes()


def test_a_plan_prints_a_line_for_each_dispatch() -> None:
    lines = str(toy.plan(5, 3)).splitlines()
    assert lines[0] == "only: rows 3 to 7"
    assert [line.split()[0] for line in lines[1:]] == ["toy_scale", "square", "toy_add", "toy_out"]
    assert "grid (5, 1, 1)" in lines[1] and "on the host" in lines[2]
