"""What can be given for a buffer, how it arrives in the kernel, and what is refused before anything runs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import lab
from lab.arguments import empty, geometry

SOURCE = """
struct Inner { ushort tag; float3 at; };
struct Params { uint n; float gain[2]; half low; bool flag; Inner inner; Inner pair[2]; float2x2 m; char4 c;
    };
template <class T> struct Wrapped { T x; };
struct Variant { uint kind; union { uint u; float f; }; };

kernel void read_params(constant Params& p, device float* out) {
    out[0] = p.n; out[1] = p.gain[0]; out[2] = p.gain[1]; out[3] = p.low; out[4] = p.flag;
    out[5] = p.inner.tag; out[6] = p.inner.at.x; out[7] = p.inner.at.z; out[8] = p.pair[1].tag;
        out[9] = p.pair[1].at.y;
    out[10] = p.m[0][1]; out[11] = p.m[1][0]; out[12] = p.c.w;
}
kernel void read_variant(constant Variant& v, device float* out) { out[0] = v.kind == 0 ? float(v.u) : v.f; }
kernel void read_wrapped(constant Wrapped<float>& w, device float* out) { out[0] = w.x; }
kernel void read_vectors(constant float3& a, constant packed_float3& b, constant float3x3& m,
    constant uint (&n)[3],
                         device float* out) {
    for (int i = 0; i < 3; i++) { out[i] = a[i]; out[3 + i] = b[i]; out[6 + i] = n[i]; out[9 + i] = m[i][0]; }
}
kernel void read_many(device const float3* a, constant Inner* s, device const uchar* raw, device float* out) {
    out[0] = a[1].x; out[1] = s[1].tag; out[2] = s[1].at.z; out[3] = raw[2];
}
kernel void add(device const float4* x, device float4* y, constant float& a,
    uint i [[thread_position_in_grid]]) {
    y[i] += a * x[i];
}
kernel void two(device int* first [[buffer(3)]], device const int* source [[buffer(1)]],
    device uint* second [[buffer(0)]],
                uint i [[thread_position_in_grid]]) {
    first[i] = source[i] + 1; second[i] = source[i] + 2;
}
kernel void fill(device int* out, constant int& value, uint i [[thread_position_in_grid]]) { out[i] = value; }
kernel void nothing(device const int* x) { }
kernel void bump(device Inner* s, uint i [[thread_position_in_grid]]) { s[i].tag += 1; s[i].at.y = 7; }
kernel void untyped(device void* p, device int* out) { out[0] = *(device int*)p; }
kernel void shared(device int* x, threadgroup int* t) { x[0] = 1; }
"""

INNER = {"tag": 3, "at": (1.0, 2.0, 4.0)}
PARAMS = {
    "n": 9,
    "gain": [0.5, -2.0],
    "low": 0.25,
    "flag": True,
    "inner": INNER,
    "pair": [INNER, {"tag": 65535, "at": [0.0, 8.0, 0.0]}],
    "m": [[1.0, 2.0], [3.0, 4.0]],
    "c": (1, 2, 3, -4),
}
READ = [9, 0.5, -2, 0.25, 1, 3, 1, 4, 65535, 8, 2, 3, -4]

INNER_RECORD = np.dtype(
    {"names": ["tag", "at"], "formats": ["u2", ("f4", 3)], "offsets": [0, 16], "itemsize": 32}
)


@pytest.fixture(scope="module")
def kernels(msl) -> lab.Library:
    return msl(SOURCE)


def refused(call, *args, **named) -> str:
    """The one sentence with which ``call`` is refused."""
    with pytest.raises(lab.ArgumentError) as caught:
        call(*args, **named)
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    return text


# ---- structs -----------------------------------------------------------------------------------------------


def test_a_mapping_fills_a_struct(kernels):
    assert np.asarray(kernels.read_params(PARAMS, empty(13), grid=1)).tolist() == READ


def test_a_mapping_takes_arrays_and_scalars_of_numpy_and_mlx(kernels):
    given = PARAMS | {
        "n": np.uint32(9),
        "gain": mx.array([0.5, -2.0]),
        "low": np.float16(0.25),
        "flag": np.bool_(True),
        "m": np.array([[1, 2], [3, 4]], np.float64),
        "c": mx.array([1, 2, 3, -4], mx.int8),
    }
    assert np.asarray(kernels.read_params(given, empty(13), grid=1)).tolist() == READ


def test_a_record_with_the_layout_of_the_struct_fills_it(kernels):
    layout = np.dtype(
        {
            "names": ["n", "gain", "low", "flag", "inner", "pair", "m", "c"],
            "formats": [
                "u4",
                ("f4", 2),
                "f2",
                "?",
                INNER_RECORD,
                (INNER_RECORD, 2),
                ("f4", (2, 2)),
                ("i1", 4),
            ],
            "offsets": [0, 4, 12, 14, 16, 48, 112, 128],
            "itemsize": 144,
        }
    )
    record = np.zeros((), layout)
    for name in ("n", "gain", "low", "flag", "m", "c"):
        record[name] = PARAMS[name]
    record["inner"]["tag"], record["inner"]["at"] = 3, (1, 2, 4)
    record["pair"]["tag"][1], record["pair"]["at"][1] = 65535, (0, 8, 0)
    for given in (record, record[()], record.reshape(1)):
        assert np.asarray(kernels.read_params(given, empty(13), grid=1)).tolist() == READ


def test_a_record_of_another_layout_is_converted_field_by_field(kernels):
    packed = np.array([(3, (1.0, 2.0, 4.0))], [("tag", "i8"), ("at", "f8", 3)])
    record = np.zeros((), [("c", "i8", 4), ("m", "f8", (2, 2)),
                           ("pair", packed.dtype, 2), ("inner", packed.dtype),
                           ("flag", "i4"), ("low", "f8"), ("gain", "f8", 2), ("n", "i8")])  # fmt: skip
    for name in ("n", "gain", "low", "flag", "m", "c"):
        record[name] = PARAMS[name]
    record["inner"] = packed[0]
    record["pair"]["tag"], record["pair"]["at"][1] = (3, 65535), (0, 8, 0)
    assert np.asarray(kernels.read_params(record, empty(13), grid=1)).tolist() == READ


def test_a_record_with_other_types_at_the_same_places_is_not_taken_bit_for_bit(kernels):
    other = np.dtype(
        {"names": ["tag", "at"], "formats": ["f2", ("f4", 3)], "offsets": [0, 16], "itemsize": 32}
    )
    record = np.zeros(2, other)
    record["tag"] = 5
    out = kernels.read_many(np.zeros(8, np.float32), record, np.zeros(3, np.uint8), empty(4), grid=1)
    assert np.asarray(out)[1] == 5


def test_bytes_fill_a_struct_as_they_are(kernels):
    data = np.float32(2.5).tobytes()
    for given in (
        data,
        bytearray(data),
        memoryview(data),
        np.frombuffer(data, np.uint8),
        mx.array(list(data), mx.uint8),
    ):
        assert kernels.read_wrapped(given, empty(1), grid=1).item() == 2.5


def test_one_member_of_a_union_is_enough(kernels):
    assert kernels.read_variant({"kind": 0, "u": 7}, empty(1), grid=1).item() == 7
    assert kernels.read_variant({"kind": 1, "f": 0.5}, empty(1), grid=1).item() == 0.5
    assert "lacks f, u" in refused(kernels.read_variant, {"kind": 1}, empty(1), grid=1)


def test_lists_of_mappings_and_records_fill_an_array_of_structs(kernels):
    records = np.zeros(2, INNER_RECORD)
    records["tag"], records["at"] = (1, 3), [(0, 0, 0), (1, 2, 4)]
    for given in ([{"tag": 1, "at": (0, 0, 0)}, INNER], records):
        out = kernels.read_many(np.zeros(8, np.float32), given, np.zeros(3, np.uint8), empty(4), grid=1)
        assert np.asarray(out)[1:3].tolist() == [3, 4]


def test_records_that_are_written_come_back_as_records(kernels):
    records = np.zeros((2, 3), INNER_RECORD)
    records["tag"] = np.arange(6).reshape(2, 3)
    out = kernels.bump(records, grid=6)
    assert out["tag"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert (out["at"] == (0, 7, 0)).all()
    assert records["tag"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n": -1}, "got -1 for Params.n: uint holds 0 to 4294967295"),
        ({"n": 1.5}, "got 1.5 for Params.n: it is not a whole number"),
        ({"gain": [1]}, "got 1 number for Params.gain: it takes 2 numbers"),
        ({"gain": "ab"}, "for Params.gain: a number or a list of numbers fits"),
        ({"inner": {"tag": 1}}, "got a mapping that lacks at"),
        ({"pair": [INNER]}, "got 1 values for Params.pair: it takes 2"),
        ({"extra": 1}, "got a mapping that has extra, which Params does not"),
    ],
)
def test_a_wrong_member_is_named(kernels, changes, words):
    text = refused(kernels.read_params, PARAMS | changes, empty(13), grid=1)
    assert text.startswith("Kernel 'read_params', buffer(0) 'p' takes constant Params&, got ")
    assert words in text


def test_missing_members_are_listed(kernels):
    few = {k: v for k, v in PARAMS.items() if k not in ("low", "gain")}
    assert "got a mapping that lacks gain, low." in refused(kernels.read_params, few, empty(13), grid=1)


@pytest.mark.parametrize("value", [5, None, [1, 2], mx.zeros(36)])
def test_what_is_no_struct_is_told_the_forms_of_one(kernels, value):
    text = refused(kernels.read_params, value, empty(13), grid=1)
    assert "give a mapping of its fields (n, gain, low, flag, inner, pair, m, c), a NumPy record" in text


def test_bytes_of_another_size_are_refused(kernels):
    assert "got 3 bytes: it is 144 bytes" in refused(kernels.read_params, b"123", empty(13), grid=1)


def test_a_mapping_does_not_fill_what_has_no_fields_here(kernels):
    assert "takes constant Wrapped<float>&, got a mapping: its fields are not known here" in refused(
        kernels.read_wrapped, {"x": 1.0}, empty(1), grid=1
    )
    assert "a mapping fits a struct only" in refused(kernels.add, mx.zeros(4), mx.zeros(4), {"a": 1}, grid=1)


# ---- scalars, vectors, arrays ------------------------------------------------------------------------------


def test_vectors_matrices_and_arrays_are_given_as_lists(kernels):
    m = [[1, 0, 0], [2, 0, 0], [3, 0, 0]]  # columns
    out = kernels.read_vectors((1, 2, 3), [4, 5, 6], m, (7, 8, 9), empty(12), grid=1)
    assert np.asarray(out).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]


def test_a_list_of_float3_is_padded_for_the_kernel(kernels):
    out = kernels.read_many([[1, 2, 3], [4, 5, 6]], [INNER, INNER], [1, 2, 3], empty(4), grid=1)
    assert np.asarray(out)[0] == 4


@pytest.mark.parametrize(
    "value", [2, 2.0, True + 1, np.float32(2), np.int64(2), mx.array(2.0), np.float32([2]), [2]]
)
def test_a_number_comes_in_many_forms(kernels, value):
    out = kernels.add(mx.ones(4), mx.ones(4), value, grid=1)
    assert np.asarray(out).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("bool", True), ("char", -128), ("uchar", 255), ("short", -32768), ("ushort", 65535),
        ("int", -(1 << 31)), ("uint", (1 << 32) - 1), ("long", -(1 << 63)), ("ulong", (1 << 64) - 1),
        ("half", 65504.0), ("bfloat", -1.5),
        ("float", 1e38),
    ],
)  # fmt: skip
def test_the_extremes_of_every_scalar_arrive(msl, scalar, value):
    kernel = msl(f"kernel void f(constant {scalar}& v, device {scalar}* out) {{ out[0] = v; }}").f
    dtype = {"bool": "bool", "half": "float16", "bfloat": "bfloat16", "float": "float32"}.get(
        scalar, {"char": "int8", "uchar": "uint8", "short": "int16", "ushort": "uint16"}.get(scalar)
        or {"int": "int32", "uint": "uint32", "long": "int64", "ulong": "uint64"}.get(scalar),
    )  # fmt: skip
    assert kernel(value, empty(1, dtype), grid=1).item() == (
        np.float32(value) if scalar == "float" else value
    )


@pytest.mark.parametrize(
    ("scalar", "value", "words"),
    [
        ("uint", -1, "uint holds 0 to 4294967295"),
        ("uchar", 256, "uchar holds 0 to 255"),
        ("int", 0.5, "it is not a whole number, and int holds whole numbers"),
        ("int", float("nan"), "it is not a whole number"),
        ("long", 1 << 63, "long holds -9223372036854775808 to 9223372036854775807"),
        ("float", "1.0", "a number or a list of numbers fits"),
        ("float", None, "got None: a number or a list of numbers fits"),
        ("float", 1j, "a number or a list of numbers fits"),
        ("float", [1, 2], "got 2 numbers: it takes 1 number"),
    ],
)
def test_a_number_that_does_not_fit_is_refused(msl, scalar, value, words):
    kernel = msl(f"kernel void f(constant {scalar}& v, device {scalar}* out) {{ out[0] = v; }}").f
    text = refused(kernel, value, mx.zeros(1), grid=1)
    assert text.startswith(f"Kernel 'f', buffer(0) 'v' takes constant {scalar}&, got ")
    assert words in text


def test_an_array_of_another_dtype_is_told_how_to_convert(kernels):
    text = refused(kernels.add, mx.zeros(4, mx.float16), mx.zeros(4), 1, grid=1)
    assert text == (
        "Kernel 'add', buffer(0) 'x' takes device const float4*, got an array of float16, shape (4,): "
        "use .astype(mx.float32) or, for the same bits, .view(mx.float32)."
    )


@pytest.mark.parametrize(
    ("scalar", "given", "words"),
    [
        ("float", np.zeros(4, np.int64), "use .astype(np.float32) or, for the same bits, .view(np.float32)."),
        ("float", np.zeros(4), "use .astype(np.float32)."),
        ("int", np.zeros(4), "use .astype(np.int32)."),
        ("bool", np.zeros(4, np.uint8), "use .astype(np.bool_) or"),
        ("bool", mx.zeros(4, mx.uint8), "use .astype(mx.bool_) or"),
        ("bfloat", np.zeros(4, np.float32), "use mx.array(...).astype(mx.bfloat16)."),
        ("int", empty(4, mx.float32), "give lab.empty a dtype of mx.int32."),
    ],
)
def test_the_way_to_convert_is_one_that_works(msl, scalar, given, words):
    kernel = msl(f"kernel void f(device {scalar}* x) {{ x[0] = {scalar}(1); }}").f
    assert words in refused(kernel, given, grid=1)


@pytest.mark.parametrize(
    "array", [np.zeros(4), np.zeros(4, complex), mx.zeros(4, mx.complex64), np.array(["a"])]
)
def test_dtypes_kernels_have_no_type_for_are_refused(kernels, array):
    text = refused(kernels.add, array, mx.zeros(4), 1, grid=1)
    assert "use .astype(np.float32)" in text or "kernels have no type for its dtype" in text


def test_bytes_in_the_other_order_are_refused(kernels):
    assert "other order" in refused(kernels.add, np.zeros(4, ">f4"), mx.zeros(4), 1, grid=1)


def test_an_array_for_vectors_must_hold_whole_ones(kernels):
    text = refused(kernels.add, mx.zeros(6), mx.zeros(4), 1, grid=1)
    assert "shape (6,): its size must be a multiple of 4 float32 values." in text


def test_the_padding_of_a_float3_is_explained(kernels):
    text = refused(
        kernels.read_vectors, mx.zeros(3), [0] * 3, np.zeros(12, np.float32), [0] * 3, empty(12), grid=1
    )
    assert "a multiple of 4 float32 values, the room of one float3" in text


def test_a_reference_needs_one_whole_value(kernels):
    text = refused(kernels.fill, mx.zeros(4, mx.int32), mx.zeros(0, mx.int32), grid=1)
    assert text.endswith("it holds 0 bytes and 4 are read.")


def test_an_untyped_pointer_takes_an_array_of_any_dtype(kernels):
    assert kernels.untyped(mx.array([1.0]), empty(1, mx.int32), grid=1).out.item() == 0x3F800000
    assert "give an array" in refused(kernels.untyped, 3, empty(1, mx.int32), grid=1)


def test_a_strided_array_is_taken_in_its_own_order(kernels, rng):
    x = rng.integers(0, 100, (6, 8)).astype(np.int32)
    for source in (x[::2, 1::2], mx.array(x)[::2, 1::2], x.T[1::2, ::2].T):
        out = kernels.two(second=empty(12, mx.uint32), source=source, first=empty(12, mx.int32), grid=12)
        assert np.asarray(out.first).tolist() == (x[::2, 1::2].reshape(-1) + 1).tolist()


def test_an_unevaluated_array_is_evaluated(kernels):
    x = mx.arange(4) * 2 + 1
    out = kernels.two(second=empty(4, mx.uint32), source=x.astype(mx.int32), first=empty(4, mx.int32), grid=4)
    assert out.first.tolist() == [2, 4, 6, 8]


def test_an_empty_array_may_be_given(kernels):
    assert kernels.fill(mx.zeros((0, 3), mx.int32), 1, grid=0).shape == (0, 3)


# ---- which argument goes where -----------------------------------------------------------------------------


def test_arguments_go_to_buffers_in_the_order_of_their_index(kernels):
    out = kernels.two(mx.zeros(2, mx.uint32), mx.array([5, 6], mx.int32), mx.zeros(2, mx.int32), grid=2)
    assert (out.first.tolist(), out.second.tolist()) == ([6, 7], [7, 8])


def test_names_and_positions_mix(kernels):
    out = kernels.two(
        mx.zeros(2, mx.uint32), mx.zeros(2, mx.int32), source=mx.array([5, 6], mx.int32), grid=2
    )
    assert out.first.tolist() == [6, 7]


def test_out_gives_the_written_buffer_apart(kernels):
    assert kernels.add(mx.ones(4), 2, out=mx.ones(4), grid=1).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("form", ["list", "mapping"])
def test_out_gives_several_written_buffers_apart(kernels, form):
    first, second = empty(2, mx.int32), empty(2, mx.uint32)
    source = mx.array([5, 6], mx.int32)
    out = kernels.two(
        source, out=[second, first] if form == "list" else {"first": first, "second": second}, grid=2
    )
    assert (out.first.tolist(), out.second.tolist()) == ([6, 7], [7, 8])


def test_a_buffer_may_itself_be_called_out(kernels):
    assert kernels.fill(out=empty(2, mx.int32), value=3, grid=2).tolist() == [3, 3]
    assert kernels.fill(value=3, out=[empty(2, mx.int32)], grid=2).tolist() == [3, 3]


def test_a_missing_buffer_is_named_with_its_type(kernels):
    assert refused(kernels.add, mx.zeros(4), mx.zeros(4), grid=1) == (
        "Kernel 'add': buffer(2) 'a' (constant float&) is missing."
    )
    assert "lab.empty(shape, dtype) serves" in refused(kernels.add, mx.zeros(4), a=1, grid=1)


def test_one_argument_too_many_is_counted(kernels):
    text = refused(kernels.add, mx.zeros(4), mx.zeros(4), 1, 2, grid=1)
    assert text == "Kernel 'add' takes 3 buffers ('x', 'y', 'a'), got 4 arguments."


def test_an_unknown_name_is_told_the_known_ones(kernels):
    text = refused(kernels.add, mx.zeros(4), mx.zeros(4), 1, b=2, grid=1)
    assert text == "Kernel 'add' has no buffer called 'b': its buffers are 'x', 'y', 'a'."


def test_out_of_the_wrong_number_is_refused(kernels):
    text = refused(kernels.two, mx.zeros(2, mx.int32), out=[empty(2, mx.int32)], grid=2)
    assert "writes 2 buffers ('second', 'first'), out= has 1" in text


def test_out_names_only_what_is_written(kernels):
    text = refused(kernels.two, out={"source": empty(2, mx.int32)}, grid=2)
    assert text == "Kernel 'two' writes no buffer called 'source': it writes 'second', 'first'."


def test_empty_is_for_buffers_that_are_written(kernels):
    assert "the kernel only reads this buffer" in refused(kernels.add, empty(4), mx.zeros(4), 1, grid=1)


# ---- lab.empty ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [mx.float16, np.float16, "float16", np.dtype("f2")])
def test_empty_takes_dtypes_of_mlx_and_numpy(dtype):
    made = empty((2, 3), dtype)
    assert (made.shape, made.dtype, made.size) == ((2, 3), "float16", 6)


@pytest.mark.parametrize("shape", [3, np.int64(3), (3,), [3]])
def test_empty_takes_a_shape_as_an_int_or_a_sequence(shape):
    assert empty(shape).shape == (3,)


@pytest.mark.parametrize("shape", [-1, 2.5, "ab", (2, None), None])
def test_empty_refuses_what_is_no_shape(shape):
    assert "non-negative ints" in refused(empty, shape)


@pytest.mark.parametrize("dtype", [np.float64, mx.complex64, "float8", object, None])
def test_empty_refuses_dtypes_kernels_do_not_have(dtype):
    assert refused(empty, 3, dtype).startswith("lab.empty takes bool, int8, ")


# ---- the size of a dispatch --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grid", "groups", "threadgroup", "wanted_grid", "wanted_group"),
    [
        (10, None, None, (10, 1, 1), (10, 1, 1)),
        (1000, None, None, (1000, 1, 1), (256, 1, 1)),
        ((100, 3), None, None, (100, 3, 1), (32, 3, 1)),
        ((3, 100, 2), None, None, (3, 100, 2), (3, 85, 1)),
        ([5, 6, 7], None, (2, 3, 4), (5, 6, 7), (2, 3, 4)),
        (None, 4, None, (1024, 1, 1), (256, 1, 1)),
        (None, (4, 2), (8, 8), (32, 16, 1), (8, 8, 1)),
        (0, None, None, (0, 1, 1), (1, 1, 1)),
        (5, None, 1024, (5, 1, 1), (1024, 1, 1)),
    ],
)
def test_a_size_is_given_in_threads_or_in_threadgroups(grid, groups, threadgroup, wanted_grid, wanted_group):
    found = geometry("f", grid, groups, threadgroup)
    assert (found.grid, found.threadgroup) == (wanted_grid, wanted_group)


def test_the_last_threadgroups_may_be_partial():
    found = geometry("f", (10, 7, 1), None, (4, 4))
    assert (found.groups, found.group_count, found.threads, found.threads_per_group) == ((3, 2, 1), 6, 70, 16)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((None, None, None), "give its size either as grid= (threads) or as groups= (threadgroups)."),
        ((1, 1, None), "give its size either as grid= (threads) or as groups= (threadgroups), not both."),
        ((-1, None, None), "grid= takes an int or a tuple of one to three ints, none below 0, not -1."),
        (
            (None, (1, 2, 3, 4), None),
            "groups= takes an int or a tuple of one to three ints, none below 0, not (1, 2, 3, 4).",
        ),
        ((1.0, None, None), "grid= takes an int"),
        ((True, None, None), "grid= takes an int"),
        (("8", None, None), "grid= takes an int"),
        (({}, None, None), "a size is an int or a tuple of one to three ints."),
        ((1, None, 2048), "threadgroup=2048 is 2048 threads; a threadgroup has at most 1024."),
        ((1, None, (32, 32, 2)), "threadgroup=(32, 32, 2) is 2048 threads; a threadgroup has at most 1024."),
        ((1, None, (4, 0)), "threadgroup=(4, 0, 1) has an extent of 0; the least is 1."),
        ((1 << 32, None, None), "a grid of 4294967296 threads is beyond 2^32 - 1 along an axis."),
        ((None, 1 << 30, 64), "is beyond 2^32 - 1 along an axis."),
    ],
)
def test_a_size_that_cannot_be_is_refused(sizes, words):
    assert words in refused(geometry, "f", *sizes)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, "threadgroup(0) 't' needs its size in bytes, as threadgroup_memory={0: bytes}."),
        ({1: 64}, "has no [[threadgroup(1)]] argument: it has threadgroup(0) 't'."),
        ({0: 0}, "threadgroup(0) 't' takes 1 to 32768 bytes, not 0."),
        ({0: 32769}, "threadgroup(0) 't' takes 1 to 32768 bytes, not 32769."),
        ({0: 1.5}, "threadgroup(0) 't' takes 1 to 32768 bytes, not 1.5."),
        (64, "threadgroup_memory= takes a mapping of indices to bytes, not 64."),
    ],
)
def test_threadgroup_memory_is_checked(kernels, given, words):
    assert words in refused(kernels.shared, mx.zeros(1, mx.int32), grid=1, threadgroup_memory=given)


def test_threadgroup_memory_for_a_kernel_without_any_is_refused(kernels):
    text = refused(kernels.nothing, [1], grid=1, threadgroup_memory={0: 4})
    assert text.endswith("has no [[threadgroup(0)]] argument: it has none.")


# ---- nothing runs before all is checked --------------------------------------------------------------------


def test_a_refused_call_compiles_and_changes_nothing(msl):
    library = msl("kernel void f(device int* x, device int* y) { x[0] = 1; y[0] = 1; }")
    x = np.zeros(1, np.int32)
    refused(library.f.run_, x, mx.zeros(1), grid=1)
    assert x.tolist() == [0]
    assert library.f.description is None


def test_an_argument_error_is_a_type_error_too(kernels):
    with pytest.raises(TypeError):
        kernels.add(grid=1)
