"""The preprocessor, and the way back from its text to the user's lines and columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.errors import CompileError
from lab.source.diagnostics import Place
from lab.source.preprocess import Preprocessed, macro_values, preprocess


def place_of(needle: str, result: Preprocessed, nth: int = 0) -> Place | None:
    """Where the user wrote what became the ``nth`` ``needle`` of the preprocessed text."""
    at = -1
    for _ in range(nth + 1):
        at = result.text.index(needle, at + 1)
    line = result.text.count("\n", 0, at) + 1
    return result.origin(line, at - result.text.rfind("\n", 0, at))


def words(result: Preprocessed) -> str:
    return " ".join(result.text.split())


def refusal(source: str, path: Path | None = None, **options) -> CompileError:
    with pytest.raises(CompileError) as caught:
        preprocess(source, path, **options)
    return caught.value


def test_text_without_macros_keeps_its_places():
    result = preprocess("int first;\n\n\tfloat second = 1; half third;\n")
    assert place_of("first", result) == Place("cell", 1, 5)
    assert place_of("second", result) == Place("cell", 3, 8)
    assert place_of("third", result) == Place("cell", 3, 25)


def test_a_line_with_comments_keeps_its_columns():
    result = preprocess("/* äöü */ int a; /* more */ int b;\n")
    assert place_of("int a", result) == Place("cell", 1, 11)
    assert place_of("int b", result) == Place("cell", 1, 29)


def test_what_a_macro_expands_to_is_placed_at_its_name():
    result = preprocess("#define TWICE(x) ((x) + (x))\nint a = 1, b = TWICE(a) + last;\n")
    assert place_of("((", result) == Place("cell", 2, 16)
    assert place_of("last", result) == Place("cell", 2, 27)


def test_text_after_an_invocation_over_several_lines_keeps_its_line():
    result = preprocess("#define ADD(x, y) (x + y)\nint a = ADD(1,\n    2);\nint last;\n")
    assert place_of("last", result) == Place("cell", 4, 5)


def test_lines_after_a_spliced_macro_definition_keep_their_numbers():
    result = preprocess("#define BODY(x) \\\n  int x; \\\n  int y;\n\nint last;\n")
    assert place_of("last", result) == Place("cell", 5, 5)


def test_lines_after_a_skipped_group_keep_their_numbers():
    result = preprocess("#if 0\n" + "int skipped;\n" * 20 + "#endif\nint last;\n")
    assert "skipped" not in result.text
    assert place_of("last", result) == Place("cell", 23, 5)


def test_a_position_outside_the_text_has_no_place():
    result = preprocess("int a;\n")
    assert result.origin(10_000, 1) is None
    assert result.origin(0, 1) is None


def test_defines_reach_the_source():
    result = preprocess("int a = N; E;", defines={"N": "7", "E": "(b + 1)"})
    assert words(result) == "int a = 7; (b + 1);"


def test_the_macros_of_a_mac_are_there():
    result = preprocess("__METAL_VERSION__ __METAL__ __METAL_MACOS__ __APPLE__ __HAVE_BFLOAT__")
    assert words(result) == "320 1 1 1 1"


def test_the_macros_of_this_machine_are_not():
    source = "__linux__ linux unix __x86_64__ __aarch64__ __OPENCL_VERSION__ __gnu_linux__"
    assert words(preprocess(source)) == source


def test_line_and_file_are_those_of_the_cell():
    assert words(preprocess("\n\n__LINE__ __FILE__", label="step")) == '3 "step"'


def test_our_own_headers_are_found_and_leave_no_text():
    assert words(preprocess("#include <metal_stdlib>\nint a;")) == "int a;"


def test_a_user_s_macro_does_not_reach_into_our_headers():
    assert (
        words(preprocess("#define T int\n#define vec 3\n#include <metal_stdlib>\nT a = vec;")) == "int a = 3;"
    )


def test_pragmas_stay():
    assert "#pragma clang loop unroll(full)" in preprocess("#pragma clang loop unroll(full)\nfor").text


def test_an_include_beside_the_file_is_found_and_named(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "part.h").write_text("\nint included;\n")
    main = tmp_path / "main.metal"
    result = preprocess('#include "sub/part.h"\nint own;\n', main)
    assert place_of("included", result) == Place("sub/part.h", 2, 5)
    assert place_of("own", result) == Place("main.metal", 2, 5)
    assert result.paths == ((tmp_path / "sub" / "part.h").resolve(),)


def test_a_cell_includes_from_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "part.h").write_text("int included;\n")
    monkeypatch.chdir(tmp_path)
    result = preprocess('int own;\n#include "part.h"\n')
    assert place_of("included", result) == Place("part.h", 1, 5)


def test_an_include_within_an_include_is_found_beside_it(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.h").write_text('#include "b.h"\n')
    (tmp_path / "sub" / "b.h").write_text("int inner;\n")
    result = preprocess('#include "sub/a.h"\n', tmp_path / "main.metal")
    assert place_of("inner", result) == Place("sub/b.h", 1, 5)


def test_files_of_one_name_are_told_apart(tmp_path):
    (tmp_path / "other").mkdir()
    other = tmp_path / "other" / "main.metal"
    other.write_text("\n\nint there;\n")
    elsewhere = tmp_path / "here" / "main.metal"
    result = preprocess("int here;\n", elsewhere, include=[other])
    there = place_of("there", result)
    assert there is not None and there.file != "main.metal"
    assert result.line_of(there) == "int there;"
    assert place_of("int here", result) == Place("main.metal", 1, 1)


def test_include_files_come_before_the_source_in_their_order(tmp_path):
    for name in ("a.h", "b.h"):
        (tmp_path / name).write_text(f"int {name[0]};\n")
    result = preprocess("int c;", include=[tmp_path / "a.h", tmp_path / "b.h"])
    assert words(result) == "int a; int b; int c;"


def test_a_line_of_the_user_s_text_comes_without_its_line_end():
    result = preprocess("int a;\r\nint b;\r\n")
    assert result.line_of(Place("cell", 2, 1)) == "int b;"


@pytest.mark.parametrize(
    ("source", "line", "column", "word"),
    [
        ('int a;\n  #error "not here"\n', 2, 4, "not here"),
        ('int a;\n#include "missing.h"\n', 2, 10, "missing.h"),
        ("int a;\n#if 1\nint b;\n", 2, 2, "unterminated"),
        ("int a;\nint b = /* half", 2, 9, "comment"),
        ("#define A(x) x\nint a = A(1, 2);\n", 2, 14, "too many arguments"),
        ("int a;\n#else\n", 2, 2, "#else"),
    ],
)
def test_a_refusal_points_into_the_cell(source, line, column, word):
    found = refusal(source)
    (first, *_) = found.diagnostics
    assert (first.place, first.level) == (Place("cell", line, column), "error")
    assert word in str(found)
    assert source.split("\n")[line - 1] in str(found)


@pytest.mark.parametrize(
    ("source", "line", "word"),
    [
        ("int a;\n#warning to be checked\n", 2, "to be checked"),
        ("#define N 1\n#define N 2\n", 2, "'N' macro redefined"),
    ],
)
def test_a_warning_comes_with_the_text(source, line, word):
    (found,) = preprocess(source).warnings
    assert (found.level, found.place and found.place.line) == ("warning", line)
    assert word in found.text


def test_a_source_that_defines_what_an_option_does_is_warned():
    (found,) = preprocess("#define N 1\nint a = N;", defines={"N": "2"}).warnings
    assert "'N' macro redefined" in found.text


def test_our_headers_raise_no_warning():
    source = (
        "#include <metal_stdlib>\n#include <metal_simdgroup>\n#include <simd/simd.h>\n#import <metal_math>\n"
    )
    assert preprocess(source).warnings == ()


def test_a_refusal_in_an_included_file_names_it(tmp_path):
    (tmp_path / "part.h").write_text("\n  #error stop\n")
    found = refusal('#include "part.h"\n', tmp_path / "main.metal")
    assert found.diagnostics[0].place == Place("part.h", 2, 4)
    assert str(tmp_path) not in str(found)


def test_a_refusal_calls_the_source_by_its_label():
    assert str(refusal("#error x", label="step")).startswith("step:1:2: error: x")


def test_a_file_name_with_quotes_and_spaces_is_taken_as_it_is(tmp_path):
    main = tmp_path / 'odd "name" \\ here.metal'
    assert place_of("own", preprocess("\nint own;", main)) == Place(main.name, 2, 5)


def test_macros_are_told_as_the_source_leaves_them(tmp_path):
    (tmp_path / "sizes.h").write_text("#ifndef A\n#define A 4\n#endif\n")
    text = '#include "sizes.h"\n#define B 2*A /* twice */\n#define C\n#undef D\nint f(int A);\n// \\'
    names = ["A", "B", "C", "D", "E"]
    how = {"path": tmp_path / "main.metal", "defines": {"D": "1"}}
    assert macro_values(names, text, **how) == {"A": "4", "B": "2*4", "C": ""}
    assert macro_values(["A"], text, tmp_path / "main.metal", defines={"A": "9"}) == {"A": "9"}


def test_every_line_leads_to_the_file_it_is_from(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.h").write_text(f"int {name}1;\nint {name}2;\n")
    main = tmp_path / "main.metal"
    result = preprocess('#include "b.h"\nint own;\n', main, include=[tmp_path / "a.h"])
    paths = {name: result.path_of(place_of(name, result).file) for name in ("a2", "b1", "own")}
    assert paths == {"a2": tmp_path / "a.h", "b1": tmp_path / "b.h", "own": None}


def test_line_directives_name_parts_of_a_text():
    text = 'int a;\n# 1 "head"\nint b;\nint c;\n# 1 "<nobody>"\nint d;\n#line 7 "tail"\nint e;\n'
    done = preprocess(text)
    b, d, e = (place_of(f"int {name};", done) for name in "bde")
    assert place_of("int a;", done) == Place("cell", 1, 1)
    assert (b, d, e) == (Place("head", 1, 1), None, Place("tail", 7, 1))
    assert done.line_of(b) == "int b;" and done.line_of(e) == "int e;"
