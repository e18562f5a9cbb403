"""The text the compiler gets, and the way back from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.source.declarations import THREAD_ATTRIBUTES
from lab.source.diagnostics import Place
from lab.source.preprocess import preprocess
from lab.source.scan import scan
from lab.source.tokens import tokenize
from lab.source.unit import Unit, describing, running

TWENTY = Path(__file__).parents[1] / "data" / "twenty.metal"


def unit_of(source: str, *, groups: bool = True, path: Path | None = None, **defines: str) -> Unit:
    """The unit that runs the first kernel of ``source``."""
    preprocessed = preprocess(source, path, defines=defines)
    found = scan(preprocessed.text)
    return running(preprocessed, found, found.kernels[0], groups=groups)


def place_of(unit: Unit, needle: str) -> Place | None:
    at = unit.text.index(needle)
    return unit.locate(unit.text.count("\n", 0, at) + 1, at - unit.text.rfind("\n", 0, at))


def test_text_after_an_edit_keeps_its_place():
    unit = unit_of("constant int a = 1; kernel void f() { threadgroup int b; int c; }\n")
    assert place_of(unit, "int c") == Place("cell", 1, 58)


def test_a_name_that_was_rewritten_is_placed_where_it_stood():
    unit = unit_of("kernel void f() { }\nconstant int table[2] = {1, 2};\n")
    assert place_of(unit, "table__msl") == Place("cell", 2, 14)


def test_what_we_generate_has_no_place():
    unit = unit_of("kernel void f(device int* x) { x[0] = 1; }\n")
    assert place_of(unit, "msl_bind") is None
    assert unit.locate(1, 1) is None
    assert unit.locate(10_000, 1) is None


def test_the_end_of_the_user_s_text_is_still_theirs():
    unit = unit_of("kernel void f() { }\nint a =")
    at = unit.text.index("int a =") + len("int a =")
    line = unit.text.count("\n", 0, at) + 1
    assert unit.locate(line, at - unit.text.rfind("\n", 0, at)) == Place("cell", 2, 8)


@pytest.mark.parametrize("kind", ["describing", "groups", "thread"])
def test_every_token_of_a_long_file_finds_its_way_back(kind):
    preprocessed = preprocess(TWENTY.read_text(), TWENTY, defines={"QD": "32"})
    found = scan(preprocessed.text)
    if kind == "describing":
        unit = describing(preprocessed, found, list(found.structs.values()))
    else:
        unit = running(preprocessed, found, found.kernels[-1], groups=kind == "groups")
    starts = [0]
    for line in unit.text.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    checked = 0
    for ours, theirs, length in unit.pieces:
        copied = preprocessed.text[theirs : theirs + length]
        assert unit.text[ours : ours + length] == copied
        for token in tokenize(copied)[:: 1 + length // 300]:  # a sample, for speed
            at, back = ours + token.offset, theirs + token.offset
            row = unit.text.count("\n", 0, at)
            before = preprocessed.text.rfind("\n", 0, back)
            wanted = preprocessed.origin(preprocessed.text.count("\n", 0, back) + 1, back - before)
            assert unit.locate(row + 1, at - starts[row] + 1) == wanted
            checked += 1
    assert checked > 300


def test_a_unit_runs_one_kernel():
    source = "kernel void f(device int* x) { }\nkernel void g(device int* x) { }\n"
    preprocessed = preprocess(source)
    found = scan(preprocessed.text)
    f, g = (running(preprocessed, found, k, groups=True).text for k in found.kernels)
    assert f != g
    assert f.count("msl_groups(") == 1


def test_a_unit_that_describes_runs_nothing():
    preprocessed = preprocess("struct S { int a; };\nkernel void f(constant S& s) { }")
    found = scan(preprocessed.text)
    text = describing(preprocessed, found, list(found.structs.values())).text
    assert "msl_kernel_0" in text and "msl_struct_0" in text
    assert "msl_groups(" not in text and "msl_thread(" not in text


@pytest.mark.parametrize("groups", [True, False])
@pytest.mark.parametrize("attribute", sorted(THREAD_ATTRIBUTES))
def test_every_thread_attribute_is_handed_over(attribute, groups):
    unit = unit_of(f"kernel void f(uint i [[{attribute}]]) {{ }}", groups=groups)
    assert "msl_attribute<signature::argument<0>>::make(" in unit.text


def test_the_same_source_makes_the_same_text():
    source = TWENTY.read_text()
    first, second = (unit_of(source, path=TWENTY, QD="32").text for _ in range(2))
    assert first == second
