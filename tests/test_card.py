"""The card below a cell, as HTML and as text."""

from __future__ import annotations

import html.parser
import re

import mlx.core as mx
import pytest

import lab
from lab.card import Card, rows

SOURCE = """
template <class T> struct Wrapped { T x; };
kernel void scale(device const float4* x [[buffer(1)]], device float4* y [[buffer(0)]],
    constant Wrapped<float>& w [[buffer(2)]],
                  threadgroup half* t [[threadgroup(0)]], uint i [[thread_position_in_grid]],
                  ushort lane [[thread_index_in_simdgroup]]) { y[i] = w.x * x[i]; }
kernel void other(device int* x) { x[0] = 1; }
"""


@pytest.fixture
def card(msl) -> Card:
    return Card(msl(SOURCE), 0.0125)


class Text(html.parser.HTMLParser):
    """Checks that tags close in order, and collects the text outside the style."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.words.append(data)


def shown(card: Card) -> str:
    parser = Text()
    parser.feed(card._repr_html_())
    assert parser.open == []
    return " ".join(parser.words)


def test_each_buffer_is_a_row_with_index_name_type_and_use(msl):
    assert rows(msl(SOURCE).scale) == [
        ("buffer(0)", "y", "device float4*", "written"),
        ("buffer(1)", "x", "device const float4*", "read"),
        ("buffer(2)", "w", "constant Wrapped<float>&", "read"),
        ("threadgroup(0)", "t", "threadgroup half*", "shared"),
    ]


@pytest.mark.parametrize("form", [shown, repr])
def test_every_form_shows_kernels_buffers_attributes_and_engine(card, form):
    text = form(card)
    for word in ("scale", "other", "buffer(1)", "device const float4*", "constant Wrapped<float>&", "written",
                 "thread_position_in_grid", "thread_index_in_simdgroup", "cpu",
                 "2 kernels read in 12 ms"):  # fmt: skip
        assert word in text


def test_source_text_cannot_break_the_html(card):
    assert "Wrapped&lt;float&gt;" in card._repr_html_()
    assert "Wrapped<float>" not in card._repr_html_()


def test_nothing_is_loaded_from_elsewhere(card):
    assert not re.search(r"https?:|src=|url\(|<script", card._repr_html_())


@pytest.mark.parametrize("form", [shown, repr])
def test_a_kernel_tells_whether_it_is_compiled(msl, form):
    source = f"kernel void f(device int* {form.__name__}) {{ {form.__name__}[0] = 1; }}"
    library = msl(source)
    assert "compiles at its first call" in form(Card(library, 0))
    library.f(mx.zeros(1, mx.int32), grid=1)
    assert re.search(r"compiled in \d+ ms", form(Card(library, 0)))
    again = msl(source + " // the same kernel")
    again.f(mx.zeros(1, mx.int32), grid=1)
    assert re.search(r"from the cache in \d+ ms", form(Card(again, 0)))


@pytest.mark.parametrize("form", [shown, repr])
def test_warnings_are_on_the_card(msl, form):
    library = msl("kernel void f(device int* x) { if (x[0] = 1) return; }")
    assert "cell:3:41: warning: using the result of an assignment" in form(Card(library, 0))


@pytest.mark.parametrize("form", [shown, repr])
def test_a_cell_without_kernels_says_how_one_begins(form):
    assert "No kernels: a kernel begins with `kernel void`" in form(Card(lab.compile("// nothing\n"), 0))


def test_a_kernel_that_cannot_be_a_variable_is_told(msl):
    source = (
        "template <class T> kernel void f(device T* x) { } template kernel void f<int>(device int*); kernel "
        "void pass() { }"
    )
    assert "No Python name, so only in the library that --name keeps: f<int>, pass." in repr(
        Card(msl(source), 0)
    )
