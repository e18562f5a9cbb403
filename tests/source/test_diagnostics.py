"""The compiler's messages, in the user's lines and in Metal's words."""

from __future__ import annotations

import pytest

from lab.source.diagnostics import Diagnostic, Place, errors, in_users_terms, parse

SOURCE = ["kernel void f()", "{", "  int a = b;", "}"]


def told(stderr: str) -> list[Diagnostic]:
    """The messages of ``stderr``, where ``cell`` is the user's and all else is ours."""
    return in_users_terms(
        parse(stderr),
        lambda file, line, column: Place(file, line, column) if file == "cell" else None,
        lambda place: SOURCE[place.line - 1],
    )


def message(text: str) -> str:
    """``text`` as an error message reaches the user."""
    (found,) = told(f"cell:3:11: error: {text}")
    return found.text


# ---- reading what the compiler printed ---------------------------------------------------------------------


def test_a_message_is_read_with_its_place_and_ranges():
    (found,) = parse("cell:3:11:{3:7-3:8}{3:11-3:12}: error: use of undeclared identifier 'b'")
    assert (found.file, found.line, found.column, found.level) == ("cell", 3, 11, "error")
    assert found.ranges == ((3, 7, 3, 8), (3, 11, 3, 12))
    assert found.text == "use of undeclared identifier 'b'"


def test_a_fatal_error_is_an_error():
    assert parse("cell:1:10: fatal error: 'x.h' file not found")[0].level == "error"


def test_other_lines_are_no_messages():
    assert parse("In file included from <stdin>:1:\n2 errors generated.\n   int a = b;\n") == []


def test_a_message_without_a_place_is_kept():
    (found,) = told("clang: error: unknown argument: '-fx'")
    assert (found.place, found.text) == (None, "unknown argument: '-fx'")


# ---- whose lines they are --------------------------------------------------------------------------------


def test_notes_stay_with_their_message():
    (found,) = told("cell:3:11: error: no b\ncell:1:13: note: f is here\n")
    assert [note.text for note in found.notes] == ["f is here"]


def test_notes_from_outside_the_user_s_source_are_dropped():
    (found,) = told("cell:3:11: error: no match\nmetal_math:7:1: note: candidate function\n")
    assert found.notes == ()


def test_a_message_from_our_headers_moves_to_the_line_that_led_there():
    (found,) = told(
        "metal_math:7:1: error: static assertion failed: wrong type\ncell:3:11: note: in instantiation of\n"
    )
    assert (found.text, found.place) == ("wrong type", Place("cell", 3, 11))
    assert found.source_line == SOURCE[2]


def test_a_bracket_without_its_partner_is_told_at_the_bracket():
    (found,) = told("<stdin>:9:1: error: expected '}'\ncell:2:1: note: to match this '{'\n")
    assert (found.text, found.place) == ("expected '}' to match this '{'", Place("cell", 2, 1))


@pytest.mark.parametrize(
    ("note", "reason"),
    [
        (
            "candidate function (the implicit copy assignment operator) not viable: no known conversion from "
            "'vec<float, 3>' to 'const __generic vec<float, 4>' for 1st argument",
            ": no conversion from 'float3' to 'float4'",
        ),
        (
            "candidate template ignored: substitution failure [with T = __global float *]: no type named "
            "'type'",
            " with T = device float *",
        ),
        (
            "candidate template ignored: could not match 'a' against 'b'",
            ": could not match 'a' against 'b'",
        ),
        ("candidate function not viable: requires 2 arguments, but 1 was provided", ""),
    ],
)
def test_why_our_headers_do_not_take_a_call_is_told(note, reason):
    head = "no matching function for call to 'f'"
    (found,) = told(f"cell:3:11: error: {head}\nmetal_math:7:1: note: {note}\n")
    assert found.text == head + reason


def test_what_follows_from_a_guess_is_not_told():
    first = "cell:3:11: error: use of undeclared identifier 'sine'; did you mean 'sin'?"
    (found,) = told(f"{first}\ncell:3:11: error: no matching function for call to 'sin'\n")
    assert found.text == "use of undeclared identifier 'sine'; did you mean 'sin'?"


def test_a_message_given_twice_is_told_once():
    assert len(told("cell:3:11: error: no b\ncell:3:11: error: no b\n")) == 1


def test_warnings_do_not_count_as_errors():
    found = told("cell:3:7: warning: unused variable 'a' [-Wunused-variable]\ncell:3:11: error: no b\n")
    assert [d.level for d in found] == ["warning", "error"]
    assert [d.text for d in errors(found)] == ["no b"]


# ---- in Metal's words --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("no conversion to '__global float *'", "no conversion to 'device float *'"),
        ("no conversion to 'const __global_host S'", "no conversion to 'constant S'"),
        ("no conversion to '__local int *__private'", "no conversion to 'threadgroup int *'"),
        ("no conversion to '__private float *'", "no conversion to 'thread float *'"),
        ("no '+' for 'const __private float' and '__private int'", "no '+' for 'const float' and 'int'"),
        ("no '+' for 'matrix<float, 4, 3>'", "no '+' for 'float4x3'"),
        ("no '+' for 'metal::atomic<unsigned int>'", "no '+' for 'atomic_uint'"),
        ("no conversion to '__generic float *'", "no conversion to 'float *'"),
        ("no '+' for 'metal::vec<float, 4>'", "no '+' for 'float4'"),
        ("no '+' for 'vec<unsigned int, 2>'", "no '+' for 'uint2'"),
        ("no '+' for 'vec<half, 3>'", "no '+' for 'half3'"),
        ("no '+' for 'metal::packed_vec<float, 3>'", "no '+' for 'packed_float3'"),
        ("cannot assign to variable 'tab__msl'", "cannot assign to variable 'tab'"),
        ("'uint4' (aka 'vec<unsigned int, 4>')", "'uint4'"),
        ("no such thing in C++ for OpenCL", "no such thing in Metal"),
        ("unused variable 'a' [-Wunused-variable]", "unused variable 'a'"),
        ("no member named 'msl_id_local'", "no member named 'local'"),
    ],
)
def test_words_of_the_compiler_become_metal_s(theirs, ours):
    assert message(theirs) == ours


def test_names_that_only_look_alike_are_left_alone():
    text = "no member named 'my__global' in 'vector<float, 4>'"
    assert message(text) == text


# ---- how they are shown ------------------------------------------------------------------------------------


def test_a_message_shows_the_line_and_a_caret_under_the_place():
    shown = Diagnostic("error", "no b", Place("cell", 3, 11), ((7, 8), (11, 12)), "  int a = b;").render()
    assert shown == "cell:3:11: error: no b\n    3 |   int a = b;\n      |       ~   ^"


def test_tabs_do_not_shift_the_caret():
    text, marks = Diagnostic("error", "x", Place("cell", 1, 3), (), "\t\tint a;").render().split("\n")[1:]
    assert marks.index("^") == text.index("int")


def test_a_caret_may_stand_after_the_end_of_the_line():
    shown = Diagnostic("error", "expected ';'", Place("cell", 3, 10), (), "  int a = ").render().split("\n")
    assert shown[2].index("^") == shown[1].index("|") + 2 + 9


def test_a_message_without_a_place_is_one_line():
    assert Diagnostic("error", "no memory", None).render() == "error: no memory"


def test_notes_follow_their_message():
    note = Diagnostic("note", "f is here", Place("cell", 1, 13), (), "kernel void f()")
    shown = Diagnostic("error", "no b", Place("cell", 3, 11), (), "  int a = b;", (note,)).render()
    assert shown.index("error: no b") < shown.index("note: f is here")
