"""The lexer: kinds, places, and half-typed text."""

from __future__ import annotations

import pytest

from lab.source.tokens import closing, closing_angle, split, tokenize


def texts(source: str) -> list[str]:
    return [t.text for t in tokenize(source)]


def kinds(source: str) -> list[str]:
    return [t.kind for t in tokenize(source)]


def test_tokens_know_their_line_and_column():
    places = {t.text: (t.line, t.column) for t in tokenize("float a;\n\n  half b =\tc;\r\nint d;")}
    assert places["float"] == (1, 1)
    assert places["a"] == (1, 7)
    assert places["half"] == (3, 3)
    assert places["c"] == (3, 12)
    assert places["d"] == (4, 5)


def test_lines_are_counted_through_comments_and_spliced_lines():
    assert [(t.text, t.line, t.column) for t in tokenize("/* 1\n 2 */ a // b\nc \\\n d")] == [
        ("a", 2, 7),
        ("c", 3, 1),
        ("d", 4, 2),
    ]


def test_comments_are_no_tokens():
    assert texts("a // b c\n/* d { */ e /**/ f") == ["a", "e", "f"]


def test_brackets_in_strings_and_characters_are_text():
    assert texts("""f("{(\\"[", '}', ')');""") == ["f", "(", '"{(\\"["', ",", "'}'", ",", "')'", ")", ";"]


@pytest.mark.parametrize(
    "number", ["0", "1.5f", ".5h", "1e-3f", "0x1p-3", "0xffu", "1'000'000", "3.f", "2.0bf"]
)
def test_a_number_is_one_token(number):
    assert [(t.kind, t.text) for t in tokenize(f"x={number};")][2] == ("number", number)


def test_a_sign_after_a_number_without_exponent_is_an_operator():
    assert texts("1-2+n") == ["1", "-", "2", "+", "n"]


def test_attribute_brackets_are_single_tokens():
    assert texts("uint i [[thread_position_in_grid]]") == ["uint", "i", "[[", "thread_position_in_grid", "]]"]


def test_two_subscripts_that_close_together_are_two_tokens():
    assert texts("a[b[0]]") == ["a", "[", "b", "[", "0", "]", "]"]


def test_a_subscript_within_an_attribute_closes_before_it():
    assert texts("[[buffer(n[0])]]") == ["[[", "buffer", "(", "n", "[", "0", "]", ")", "]]"]


def test_closing_angles_stay_apart():
    assert texts("vec<vec<T, 2>>") == ["vec", "<", "vec", "<", "T", ",", "2", ">", ">"]


@pytest.mark.parametrize(
    "operator", ["::", "->", "++", "--", "<<", "<=", "==", "!=", "&&", "||", "+=", "..."]
)
def test_operators_of_several_characters_are_one_token(operator):
    assert texts(f"a {operator} b") == ["a", operator, "b"]


def test_directives_are_passed_over():
    assert texts("a\n  #pragma clang loop unroll(full)\nfor (;;)") == ["a", "for", "(", ";", ";", ")"]


def test_a_hash_within_a_line_is_a_token():
    assert texts("a # b") == ["a", "#", "b"]


def test_a_half_typed_string_ends_with_its_line():
    assert texts('a = "b c\nd;') == ["a", "=", '"b c', "d", ";"]


def test_a_half_typed_comment_ends_with_the_text():
    assert texts("a /* b\nc") == ["a"]


def test_unknown_characters_are_tokens_of_their_own():
    assert texts("a é § b") == ["a", "é", "§", "b"]


def test_offsets_cut_the_tokens_out_of_the_text(rng):
    pieces = ["float", "x1", "[[", "]]", "[", "]", "(", ")", "{", "}", "<", ">", "::", "1.5f", '"s"', "'c'",
              '"', "'", "/*", "*/", "//", "\n", " ", "\t", "#", "\\", ";", "é", "...", "=="]  # fmt: skip
    for _ in range(200):
        source = "".join(rng.choice(pieces, rng.integers(0, 30)))
        last = 0
        for token in tokenize(source):
            assert source[token.offset : token.end] == token.text
            assert token.offset >= last
            assert token.line == source.count("\n", 0, token.offset) + 1
            assert token.column == token.offset - source.rfind("\n", 0, token.offset)
            last = token.end


def test_closing_finds_the_partner_of_a_bracket():
    tokens = tokenize("f(a[1], {b, (c)}) ; }")
    assert tokens[closing(tokens, 1)].column == 17


def test_closing_is_the_last_token_where_the_partner_is_missing():
    tokens = tokenize("f(a[1], {b")
    assert closing(tokens, 1) == len(tokens) - 1


def test_a_template_argument_list_closes_at_its_angle():
    tokens = tokenize("a<b<int>, (1 > 2)> c")
    assert tokens[closing_angle(tokens, 1)].column == 18


@pytest.mark.parametrize("source", ["a < b;", "a < b && c > d", "f(a < b) > c", "a < b", "a < b || c > d"])
def test_a_comparison_opens_no_template_arguments(source):
    tokens = tokenize(source)
    angle = next(i for i, t in enumerate(tokens) if t.text == "<")
    assert closing_angle(tokens, angle) is None


def test_a_template_s_parameters_may_hold_conditions():
    tokens = tokenize("template <class T, enable_if<sizeof(T) < 8 && same<T, int>, int> = 0> void f();")
    close = closing_angle(tokens, 1, certain=True)
    assert close is not None and tokens[close + 1].text == "void"


def test_split_leaves_brackets_and_template_arguments_whole():
    parts = split(tokenize("a[1, 2], f(b, c), vec<float, 4> v, {d, e}, [[x, y]]"))
    assert ["".join(t.text for t in part) for part in parts] == [
        "a[1,2]",
        "f(b,c)",
        "vec<float,4>v",
        "{d,e}",
        "[[x,y]]",
    ]


def test_split_of_nothing_has_no_parts():
    assert split([]) == []


def test_split_keeps_empty_parts_between_separators():
    assert [len(part) for part in split(tokenize("a,,b"))] == [1, 0, 1]
