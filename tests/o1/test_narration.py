"""What is told of each dispatch: a token enters, the oldest leaves, its weight goes into the masses."""

from __future__ import annotations

import re

import numpy as np
import pytest

import lab
import lab.o1
from lab.o1 import readings
from lab.o1.narration import happens, split_words

END = 11  # dispatches of a chunk


@pytest.fixture(scope="module")
def small() -> lab.systems.Trace:
    """One group, a ring of 8 slots, chunks of a row: from row 8 on each pushes one out."""
    sizes = lab.o1.Sizes(ng=1, hpg=1, d=8, w=8, ns=2, m=3)
    return lab.o1.session().trace(*lab.o1.example(sizes, 12), chunks=1)


def at(trace: lab.systems.Trace, kernel: str, row: int, head: int = 0) -> str:
    step = next(
        s for s in trace if s.kernel == kernel and row in range(s.plan.first, s.plan.first + s.plan.rows)
    )
    return happens(trace, step.number + 1, row, head)


def test_a_step_is_told_from_the_eviction_to_the_output(small: lab.systems.Trace) -> None:
    told = at(small, "o1c_far_e", 9)
    assert told.startswith("Token 1 will leave slot 1 of group 0 for the far field. It weighs ")
    weights = readings.flow(small, 9 * END + 1, 0).weights[0]
    assert f"weighs {', '.join(f'{x:.3g}' for x in weights)} on the landmarks of head 0" in told
    assert "2 sinks and 8 tokens of the window, itself included" in at(small, "o1c_score", 9)
    assert "they will see" not in at(small, "o1c_land", 9) and "the 2 tokens that left" in at(
        small, "o1c_land", 9
    )
    assert "the far field, 2 tokens, has a mass of " in at(small, "o1c_far", 9)
    shares = readings.weights(small, len(small), 9, 0).split()
    split = (
        f"Row 9 attends with head 0: {shares[0]:.1%} sinks, {shares[1]:.1%} window, {shares[2]:.1%} its own "
        f"chunk, {shares[3]:.1%} far field."
    )
    assert at(small, "o1c_soft", 9).endswith(split) and at(small, "o1c_add", 9).endswith(split)
    assert "row 9 has its output" in at(small, "o1c_add", 9)


def test_the_masses_are_told_before_and_after(small: lab.systems.Trace) -> None:
    told = at(small, "o1c_far_commit", 9)
    assert told.startswith("The weight of token 1 flows into the landmarks' masses. Head 0: landmark 0 ")
    before, after = (small.buffers_at(9 * END + done)["mz"][0, 3:] for done in (0, 9))
    pairs = re.findall(r"landmark (\d) (\S+) → ([^,. ]+(?:\.\d+)?)", told)
    assert [(int(b), x, y) for b, x, y in pairs] == [
        (b, f"{before[b]:.3g}", f"{after[b]:.3g}") for b in range(3)
    ]


def test_a_token_enters_where_the_oldest_lay_and_meta_follows(small: lab.systems.Trace) -> None:
    assert at(small, "o1c_ring_commit", 9) == "Token 9 enters slot 1 of group 0, where token 1 lay."
    assert at(small, "o1c_ring_commit", 3) == "Token 3 enters slot 3 of group 0, empty until now."
    assert at(small, "o1c_meta", 9) == (
        "meta follows, last of all. Group 0: length stays 8, head 1 → 2, far count 1 → 2."
    )
    assert "length 3 → 4, head stays 0, far count stays 0" in at(small, "o1c_meta", 3)


def test_a_ring_with_room_loses_nothing(small: lab.systems.Trace) -> None:
    assert at(small, "o1c_far_e", 3) == (
        "The ring of group 0 has room, 3 of 8 slots are filled: nothing leaves it, and no landmark gets "
        "anything."
    )
    assert "there is nothing yet" in at(small, "o1c_land", 3)
    assert at(small, "o1c_far", 3) == "Nothing has left the window up to row 3: it has no far field."
    assert at(small, "o1c_far_commit", 3).startswith("Nothing leaves the ring")
    assert happens(small, 0, 3, 0).startswith("Nothing has run yet.")


def test_the_row_is_one_of_the_chunk(small: lab.systems.Trace) -> None:
    assert "Row 9's query" in happens(small, 9 * END + 2, 2, 0)


@pytest.mark.parametrize("path", lab.o1.PATHS)
def test_every_dispatch_of_every_path_is_told_of(path: str, seed: int) -> None:
    sizes = lab.o1.Sizes(ng=2, hpg=2, d=128, w=16, ns=0, m=6, windows=(0, 12))
    chunks = 1 if path == "token" else 10
    trace = lab.o1.session().trace(*lab.o1.example(sizes, 30, seed), chunks=chunks, path=path)
    for position in range(1, len(trace) + 1):
        for head in range(4):
            told = happens(trace, position, 0, head)
            assert told.endswith(".") and "–" not in told and "nan" not in told, told
    end = happens(trace, len(trace), 29, 3)
    assert "Group 1: length stays 12" in end
    if path == "token":
        assert "Token 29 enters slot 5 of group 1, where token 17 lay." in end
    else:
        assert "Tokens 20 to 29 enter slots 8 on to 5 of group 1, where tokens 8 to 17 lay." in happens(
            trace, len(trace) - 1, 29, 3
        )


def test_a_ring_commit_gone_wrong_is_not_told_as_if_it_were_right() -> None:
    session = lab.o1.session()
    right = "ring.slot(ring.len + j)"
    text = session.source("o1c_ring_commit")
    assert right in text
    session.replace(text.replace(right, "(ring.slot(ring.len + j) + 1) % 8"), "o1c_ring_commit")
    sizes = lab.o1.Sizes(ng=1, hpg=1, d=8, w=8, ns=2, m=3)
    trace = session.trace(*lab.o1.example(sizes, 9), chunks=4)
    assert "where " not in at(trace, "o1c_ring_commit", 0)
    session.replace(
        text.replace("ring_k[to] = k[from];", "").replace("ring_v[to] = v[from];", ""), "o1c_ring_commit"
    )
    trace = session.trace(*lab.o1.example(sizes, 9), chunks=4)
    assert at(trace, "o1c_ring_commit", 0) == (
        "Tokens 0 to 3 should be in the ring of group 0 now, but no slot changed."
    )


def test_a_fault_is_told() -> None:
    session = lab.o1.session()
    text, right = session.source("o1c_soft"), "inv[i * u.nh + gh] = "
    assert right in text
    session.replace(text.replace(right, "inv[i * u.nh + gh + 4000000] = "), "o1c_soft")
    sizes = lab.o1.Sizes(ng=1, hpg=1, d=8, w=8, ns=2, m=3)
    trace = session.trace(*lab.o1.example(sizes, 3), chunks=1)
    assert happens(trace, len(trace), 0, 0).startswith("o1c_soft did not come to its end")


def test_shares_that_are_not_there_are_not_told(small: lab.systems.Trace) -> None:
    assert split_words(readings.weights(small, 3, 5, 0)) == ""
    assert np.isnan(readings.weights(small, 3, 5, 0).split()).any()
