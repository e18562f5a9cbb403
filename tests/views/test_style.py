"""Pooling, colours and places that all views share."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("plotly")

from lab.views import style
from lab.views.attention import COLOURS, DARK_COLOURS


def test_a_small_array_stays_as_it_is(rng: np.random.Generator) -> None:
    array = rng.standard_normal((5, 7))
    small = style.pooled(array, (5, 7))
    np.testing.assert_array_equal(small.values, array)
    np.testing.assert_array_equal(array[small.rows, small.columns], array)
    assert small.factors == (1, 1) and small.title(1, "landmark") == "landmark"


def test_a_cell_has_the_value_furthest_from_zero_and_knows_where_it_was(rng: np.random.Generator) -> None:
    for _ in range(20):
        shape, limits = rng.integers(1, 70, 2), tuple(rng.integers(1, 20, 2).tolist())
        array = rng.standard_normal(shape)
        small = style.pooled(array, limits)
        assert small.values.shape[0] <= limits[0] and small.values.shape[1] <= limits[1]
        np.testing.assert_array_equal(small.values, array[small.rows, small.columns])
        down, across = small.factors
        for (i, j), value in np.ndenumerate(small.values):
            tile = array[i * down : (i + 1) * down, j * across : (j + 1) * across]
            assert abs(value) == np.abs(tile).max()


def test_nan_is_passed_over_unless_there_is_nothing_else() -> None:
    array = np.array([[np.nan, -3.0, np.nan, np.nan, 1.0], [2.0, np.nan, np.nan, np.nan, np.nan]])
    small = style.pooled(array, (1, 3))
    np.testing.assert_array_equal(small.values, [[-3, np.nan, 1]])
    assert np.isnan(array[small.rows[0, 1], small.columns[0, 1]])  # a place inside the array


def test_infinity_is_the_furthest_from_zero() -> None:
    assert style.pooled(np.array([[5.0, -np.inf, 7.0]]), (1, 1)).values[0, 0] == -np.inf


def test_the_axis_says_that_cells_stand_for_several() -> None:
    small = style.pooled(np.zeros((10, 1000)), (64, 256))
    assert small.factors == (1, 4)
    assert small.title(0, "row") == "row" and small.title(1, "dimension") == "dimension (largest of each 4)"


def test_domains_fill_an_axis_from_end_to_end() -> None:
    first, second, third = style.domains(1, 1, 2, gap=(0.1, 0.3))
    assert first[0] == 0 and third[1] == 1
    assert second[0] - first[1] == pytest.approx(0.1) and third[0] - second[1] == pytest.approx(0.3)
    assert third[1] - third[0] == pytest.approx(2 * (first[1] - first[0]), abs=1e-3)


def test_an_axis_around_zero_has_zero_in_its_middle_and_all_values_inside(rng: np.random.Generator) -> None:
    values = rng.standard_normal(9) * 10.0 ** rng.integers(-9, 9)
    axis = style.around_zero(values)
    low, high = axis["range"]
    assert low == -high and high > np.abs(values).max()
    assert axis["tickvals"][1] == 0 and axis["tickvals"][2] <= np.abs(values).max()
    assert style.around_zero(np.array([np.nan]))["range"] == [-1.25, 1.25]


@pytest.mark.parametrize("dark", [False, True])
def test_the_scale_around_zero_has_the_page_in_its_middle_and_two_hues_at_its_ends(dark: bool) -> None:
    scale = style.diverging(dark)
    assert [at for at, _ in scale] == sorted(at for at, _ in scale) and scale[len(scale) // 2][0] == 0.5
    red, _, blue = zip(*(_rgb(scale[i][1]) for i in (0, -1)), strict=True)
    assert blue[0] > red[0] and red[1] > blue[1]
    light = [_luminance(colour) for _, colour in scale]
    middle = light[len(light) // 2]
    assert middle == (min(light) if dark else max(light))


def test_sequences_get_brighter_with_every_step() -> None:
    light = [_luminance(colour) for _, colour in style.sequence()]
    assert light == sorted(light)


# Machado, Oliveira, Fernandes 2009: what deuteranopes and protanopes see, in linear RGB.
BLIND = {
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
}


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("colours", [COLOURS, DARK_COLOURS], ids=["light", "dark"])
def test_the_parts_of_attention_stay_apart_for_colour_blind_readers(
    kind: str, colours: tuple[str, ...]
) -> None:
    seen = [np.array(BLIND[kind]) @ _linear(colour) for colour in colours]
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert np.linalg.norm(_lab(a) - _lab(b)) > 20


@pytest.mark.parametrize("dark", [False, True])
def test_a_note_says_why_there_is_no_picture(dark: bool) -> None:
    figure = style.note("Scores", "Nothing <yet>.", dark)
    assert figure.layout.annotations[0].text == "Nothing &lt;yet&gt;." and not figure.data
    assert json.loads(figure.to_json())["layout"]["title"]["text"] == "Scores"


def test_without_plotly_one_sentence_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['plotly'] = sys.modules['plotly.graph_objects'] = None\n"
        "import lab, lab.o1, lab.qsa\n"
        "try:\n    import lab.views\n"
        "except lab.LabError as problem:\n    print(problem)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "metal-kernel-lab[notebook]" in told and len(told.splitlines()) == 1


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def _linear(colour: str) -> np.ndarray:
    x = np.array(_rgb(colour)) / 255
    return np.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055) ** 2.4)


def _luminance(colour: str) -> float:
    return float(_linear(colour) @ [0.2126, 0.7152, 0.0722])


def _lab(linear: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB."""
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.cbrt(np.array(to_xyz) @ np.clip(linear, 0, 1) / [0.9505, 1.0, 1.089])
    return np.array([116 * xyz[1] - 16, 500 * (xyz[0] - xyz[1]), 200 * (xyz[1] - xyz[2])])
