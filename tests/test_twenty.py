"""A file of several hundred lines and twenty kernels, compiled unmodified; every kernel against NumPy "
"in float64."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import lab

FILE = Path(__file__).with_name("data") / "twenty.metal"
QD = 32


@pytest.fixture(scope="module")
def twenty() -> lab.Library:
    return lab.compile(FILE, defines={"QD": QD})


def close(got, wanted, tolerance: float = 1e-6) -> None:
    """Whether ``got`` is ``wanted`` within ``tolerance`` of the largest finite value; infinities where "
    "they belong."""
    got, wanted = np.asarray(got), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    finite = np.isfinite(wanted)
    assert np.array_equal(np.where(finite, 0, wanted), np.where(finite, 0, got.astype(np.float64)))
    scale = np.abs(wanted[finite]).max(initial=1e-30)
    error = np.abs(got.astype(np.float64)[finite] - wanted[finite]).max(initial=0.0)
    assert error <= tolerance * scale, f"{error / scale:.2e} of the largest value"


def floats(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32)


def frame(rng: np.random.Generator, **changes) -> dict:
    return {
        "n": 20,
        "stride": 3,
        "gain": 1.5,
        "bias": list(map(float, floats(rng, 4))),
        "origin": list(map(float, floats(rng, 3))),
        "size": (1.0, 2.5, 3.0),
        "low": 0.125,
        "flip": True,
        "step": 40000,
        **changes,
    }


def test_the_file_has_twenty_kernels(twenty):
    assert len(twenty) == 20
    assert FILE.read_text().count("\n") > 300


def test_only_the_kernel_asked_for_is_compiled(rng):
    library = lab.compile(FILE, defines={"QD": QD + 4})
    library.added(floats(rng, 4), floats(rng, 4), lab.empty(4), grid=4)
    assert [k.name for k in library.values() if k.description is not None] == ["added"]


def test_a_method_on_constant_memory_walks_a_ring(twenty, rng):
    cells = floats(rng, 12)
    out = twenty.unroll_ring(cells, lab.empty(10), {"head": 3, "length": 8, "capacity": 12}, grid=10)
    age = np.arange(8)
    close(out, [*cells[(3 + 12 - 8 + age) % 12], -np.inf, -np.inf])


@pytest.mark.parametrize("flip", [True, False])
def test_a_parameter_struct_is_read_field_by_field(twenty, rng, flip):
    x, y, u = floats(rng, 60), floats(rng, 25), frame(rng, flip=flip)
    out = twenty.affine(x, mx.array(y), u, grid=25)
    i = np.arange(20)
    v = x[i * 3].astype(np.float64) * (-1 if flip else 1)
    wanted = v * 1.5 * np.array(u["bias"])[i & 3] + 0.125 + np.array(u["origin"])[i % 3] * 2.5 + 40000
    close(out, [*wanted, *y[20:]])


def test_nested_structs_and_arrays_in_structs_are_read(twenty, rng):
    basis = floats(rng, 4, 4)  # four columns
    t = {
        "frame": frame(rng),
        "spans": [{"first": 0, "last": 5}, {"first": 2, "last": 4}],
        "basis": basis,
        "tag": (1, 2, 3, 4),
    }
    out = twenty.tiles(t, lab.empty((8, 4)), grid=8)
    wanted = np.zeros((8, 4))
    for i in range(8):
        v = np.array([*t["frame"]["origin"], 1.0])
        if [0 <= i < 5, 2 <= i < 4][i % 2]:
            v = basis.astype(np.float64).T @ v
        wanted[i] = [v[0] + 5, v[1] + 2, v[2], 3]
    close(out, wanted)


def test_scores_read_rows_as_float4_and_mask_with_infinity(twenty, rng):
    rows, keys, heads = 5, 37, 3
    q, k = floats(rng, rows, heads, QD), floats(rng, keys, QD)
    first = rng.integers(0, 10, rows)
    spans = [{"first": int(f), "last": int(f) + 20} for f in first]
    shape = {"rows": rows, "keys": keys, "heads": heads, "scale": 0.25}
    out = lab.empty((rows, keys, heads))
    got = twenty.scores(q=q, k=k, out=out, s=shape, visible=spans, grid=(keys, rows, heads))
    wanted = 0.25 * np.einsum("rhd,kd->rkh", q.astype(np.float64), k.astype(np.float64))
    hidden = (np.arange(keys) < first[:, None]) | (np.arange(keys) >= first[:, None] + 20)
    close(got, np.where(hidden[:, :, None], -np.inf, wanted))


def test_bytes_are_read_as_char4_through_a_cast_pointer(twenty, rng):
    w = rng.integers(-128, 128, 16 * 9).astype(np.int8)
    scales = rng.uniform(0.001, 0.1, 9).astype(np.float16)
    out = twenty.dequantise(w, scales, lab.empty(w.size), grid=9)
    close(np.asarray(out).reshape(9, 16), w.reshape(9, 16) * scales.astype(np.float64)[:, None])


def test_pairs_are_read_and_written_through_cast_pointers(twenty, rng):
    x, angles = floats(rng, 6, 5, 2), floats(rng, 5)
    out = twenty.rotate_pairs(x, angles, grid=(5, 6))
    turn = np.exp(1j * angles.astype(np.float64))
    z = (x[..., 0].astype(np.float64) + 1j * x[..., 1]) * turn
    close(out, np.stack([z.real, z.imag], -1))


def test_helpers_change_what_thread_references_name(twenty, rng):
    x = floats(rng, 7, 33)
    shape = {"rows": 7, "keys": 33, "heads": 1, "scale": 1.0}
    result = twenty.largest(x, lab.empty(7), lab.empty(7, mx.uint32), shape, grid=7)
    assert np.array_equal(result.value, x.max(1))
    assert np.array_equal(result.where, x.argmax(1))


def test_attributes_of_every_width_stand_side_by_side(twenty):
    grid, group = (10, 6, 4), (4, 3, 2)
    layout = np.dtype(
        {
            "names": ["grid", "group", "flat", "size", "lanes"],
            "formats": [("u4", 3), ("u2", 3), "u4", ("u2", 3), "u4"],
            "offsets": [0, 16, 24, 32, 40],
            "itemsize": 48,
        }
    )
    out = twenty.positions(np.zeros((4, 6, 10), layout), grid=grid, threadgroup=group)
    got = np.asarray(out)
    z, y, x = np.indices((4, 6, 10))
    assert np.array_equal(got["grid"], np.stack([x, y, z], -1))
    assert np.array_equal(got["group"], np.stack([x // 4, y // 3, z // 2], -1))
    width, height, depth = np.where(x < 8, 4, 2), 3, 2
    assert np.array_equal(got["size"], np.stack(np.broadcast_arrays(width, height, depth), -1))
    assert np.array_equal(got["flat"], (z % 2 * height + y % 3) * width + x % 4)
    assert (got["lanes"] == 32).all()


@pytest.mark.parametrize(
    ("name", "operation"), [("added", np.add), ("less", np.subtract), ("times", np.multiply)]
)
def test_a_macro_defines_kernels(twenty, rng, name, operation):
    a, b = floats(rng, 2, 50)
    close(twenty[name](a, b, lab.empty(50), grid=50), operation(a.astype(np.float64), b))


@pytest.mark.parametrize(
    ("name", "source", "result", "n"),
    [
        ("sum2_half", "float16", "float32", 2),
        ("sum3_int", "int32", "int64", 3),
        ("sum4_uchar", "uint8", "uint16", 4),
    ],
)
def test_a_template_is_instantiated_under_host_names(twenty, rng, name, source, result, n):
    x = rng.integers(0, 100, (11, n)).astype(source)
    out = twenty[name](x, lab.empty(11, np.dtype(result)), grid=11)
    assert np.asarray(out).dtype == result
    wanted = x.astype(np.int64).sum(1) & (0xFF if source == "uint8" else -1)  # a uchar's sum is a uchar
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("kind", [0, 1, 4])
def test_the_other_form_of_a_kernel_numbers_its_buffers(twenty, rng, kind):
    x = floats(rng, 40)
    activated = {0: x, 1: np.maximum(x, 0), 4: x.astype(np.float64) ** 2}[kind]
    close(twenty.activate(x, kind, 0.25, grid=40), np.maximum(activated, 0.25))


def test_a_table_at_program_scope_is_looked_up(twenty, rng):
    codes = np.array(
        [
            -1,
            -0.75,
            -0.5,
            -0.375,
            -0.25,
            -0.1875,
            -0.125,
            -0.0625,
            0,
            0.0625,
            0.125,
            0.1875,
            0.25,
            0.5,
            0.75,
            1,
        ]
    )
    packed = rng.integers(0, 256, 100).astype(np.uint8)
    out = twenty.lookup(packed, lab.empty((100, 2)), grid=100)
    assert np.array_equal(out, np.stack([codes[packed & 15], codes[packed >> 4]], -1))


def test_threads_count_in_device_memory(twenty, rng):
    v = rng.integers(0, 1000, 5000).astype(np.uint32)
    result = twenty.tally(v, mx.zeros(8, mx.uint32), mx.array([7], mx.int32), grid=v.size, threadgroup=32)
    assert np.array_equal(result.counts, np.bincount(v & 7, minlength=8))
    assert np.asarray(result.signed_sum).item() == 7 - int(v.sum())


def test_constant_arrays_come_by_reference_and_by_pointer(twenty, rng):
    x = floats(rng, 4, 5, 6)
    strides = np.array([1, 6, 30], np.uint32)  # of the transpose
    out = twenty.strided(x, lab.empty((6, 5, 4)), (6, 5, 4), strides, grid=(4, 5, 6))
    assert np.array_equal(out, x.transpose(2, 1, 0))


def test_bits_swizzles_and_wide_integers_are_exact(twenty, rng):
    a = rng.integers(0, 1 << 32, 200, dtype=np.uint64).astype(np.uint32)
    limits = np.array([1 << 20, 1 << 25, 1 << 30, 1 << 31], np.uint32)
    result = twenty.mixed(
        a, lab.empty(200, mx.uint64), lab.empty((200, 4)), lab.empty(200, mx.bfloat16), limits, grid=200
    )
    bits = np.array([int(x).bit_count() for x in a], np.uint64)
    above = np.array([int(np.argmax(limits > x)) if (limits > x).any() else 4 for x in a], np.uint64)
    assert np.array_equal(result.wide, a.astype(np.uint64) << np.uint64(32) | bits | above << np.uint64(8))
    f = ((a & 0x7FFFFF) | 0x3F800000).view(np.float32)
    i = np.arange(200)
    first, second = np.where(i & 1, 2.0, 0.0), np.where(i & 1, 3.0, 1.0)
    v = np.stack([2 * f, 4 * f, 2 * second, first], -1)
    odd = (a & 1).astype(bool)
    assert np.array_equal(result.turned, np.where(odd[:, None], v, v[:, ::-1]))
    rounded = mx.array(np.where(odd, -f, f)).astype(mx.bfloat16)
    assert mx.array_equal(result.short_floats, rounded)


def test_operators_of_the_user_s_own_differentiate_a_polynomial(twenty, rng):
    coefficients, at = floats(rng, 6), rng.uniform(-1, 1, 30).astype(np.float32)
    result = twenty.horner(coefficients, lab.empty(30), lab.empty(()), 5, at, grid=30)
    close(
        result.slopes,
        np.polynomial.Polynomial(coefficients.astype(np.float64)).deriv()(at.astype(np.float64)),
        1e-5,
    )
    close(result.norm, coefficients.astype(np.float64).sum() / 5, 1e-5)


def test_a_missing_define_stops_with_the_file_s_own_error():
    with pytest.raises(
        lab.CompileError, match=r"twenty\.metal:8:2: error: .QD, the head dimension, is not defined"
    ):
        lab.compile(FILE)


def test_an_error_in_the_neighbour_is_told_by_its_name(tmp_path):
    for name in ("twenty.metal", "shapes.h"):
        text = FILE.with_name(name).read_text()
        (tmp_path / name).write_text(text.replace("return last - first;", "return last - frist;"))
    with pytest.raises(lab.CompileError, match=r"^shapes\.h:18:41: error: .*'frist'") as caught:
        lab.compile(tmp_path / "twenty.metal", defines={"QD": QD})
    assert str(tmp_path) not in str(caught.value)
