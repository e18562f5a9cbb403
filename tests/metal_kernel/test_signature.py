"""The generated kernel is MLX's to the letter: MLX prints its own when it exports a graph."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

import lab
from lab.mlxfast.signature import SMALL, Body, Input, generate

DTYPES = (
    mx.bool_, mx.int8, mx.uint8, mx.int16, mx.uint16, mx.int32, mx.uint32, mx.int64, mx.uint64, mx.float16,
    mx.bfloat16, mx.float32, mx.complex64,
)  # fmt: skip
SHAPES = ((), (1,), (7,), (8,), (2, 3), (2, 4), (0,), (1, 1, 1))
ATTRIBUTES = (
    "dispatch_quadgroups_per_threadgroup", "dispatch_simdgroups_per_threadgroup",
    "dispatch_threads_per_threadgroup", "grid_origin", "grid_size", "quadgroup_index_in_threadgroup",
    "quadgroups_per_threadgroup", "simdgroup_index_in_threadgroup", "simdgroups_per_threadgroup",
    "thread_execution_width", "thread_index_in_quadgroup", "thread_index_in_simdgroup",
    "thread_index_in_threadgroup", "thread_position_in_grid", "thread_position_in_threadgroup",
    "threadgroup_position_in_grid", "threadgroups_per_grid", "threads_per_grid", "threads_per_simdgroup",
    "threads_per_threadgroup",
)  # fmt: skip


@pytest.fixture
def mlx_generates(tmp_path, capfd):
    """What MLX prints for a call: the body, its inputs, output dtypes and template arguments."""

    def generated(body, inputs, dtypes, template):
        kernel = mx.fast.metal_kernel(
            name=body.name,
            input_names=list(body.inputs),
            output_names=list(body.outputs),
            source=body.source,
            header=body.header,
            atomic_outputs=body.atomic_outputs,
        )

        def call(unused):
            return kernel(
                inputs=inputs,
                output_shapes=[(2,)] * len(dtypes),
                output_dtypes=dtypes,
                grid=(1, 1, 1),
                threadgroup=(1, 1, 1),
                template=template,
                verbose=True,
                stream=mx.gpu,
            )

        capfd.readouterr()
        mx.export_function(str(tmp_path / "graph.mlxfn"), call, mx.zeros(1))
        return capfd.readouterr().out

    return generated


def check(mlx_generates, body, inputs, dtypes, template=()):
    kinds = [Input(x.dtype, x.ndim == 0, x.size < SMALL) for x in inputs]
    text = generate(body, kinds, dtypes, template).text
    printed = f"Generated source code for `{body.name}`:\n```\n{text}\n```\n"
    assert printed == mlx_generates(body, inputs, dtypes, template)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(mlx_generates, dtype):
    body = Body("f", ("a", "b"), ("c", "d"), "c[0] = a[0];")
    inputs = [mx.zeros((3, 3), dtype), mx.zeros((), dtype)]
    check(mlx_generates, body, inputs, [dtype, dtype], [("T", dtype)])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("asked", ("", "a_shape", "a_strides", "a_ndim", "// xa_shape_ a_strides a_ndim"))
def test_shapes_and_what_the_source_asks_of_them(mlx_generates, shape, asked):
    body = Body("f", ("a",), ("out",), f"{asked}\nout[0] = 1;")
    check(mlx_generates, body, [mx.zeros(shape)], [mx.float32])


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_attributes_are_found_by_name(mlx_generates, attribute):
    body = Body("f", ("a",), ("out",), f"out[0] = my_{attribute}s;")
    check(mlx_generates, body, [mx.zeros(9)], [mx.float32])


@pytest.mark.parametrize("atomic", (False, True))
@pytest.mark.parametrize("outputs", (1, 2, 3))
def test_outputs(mlx_generates, atomic, outputs):
    names = tuple("pqr"[:outputs])
    for source in ("p[0] = 1;", "a_shape", "a_shape b_strides a_ndim threads_per_grid"):
        body = Body("f", ("a", "b"), names, source, "", atomic)
        check(mlx_generates, body, [mx.zeros(9), mx.zeros(2)], [mx.float32] * outputs)


@pytest.mark.parametrize("header", ("", "\n", "// end", "#define N 3\n", "int f() {\n  return 1;\n}\n\n"))
@pytest.mark.parametrize("source", ("", "\n", "out[0] = 1;", "\nout[0] = 1;\n\n"))
def test_texts_are_taken_as_they_are(mlx_generates, header, source):
    check(mlx_generates, Body("f", ("a",), ("out",), source, header), [mx.zeros(9)], [mx.float32])


@pytest.mark.parametrize("count", (1, 2, 3))
def test_template_arguments(mlx_generates, count):
    values = (True, False, 0, -1, 2147483647, -2147483648, mx.bfloat16, mx.uint8)
    for chosen in itertools.islice(itertools.combinations(values, count), 0, None, 3):
        template = [(f"T{i}", value) for i, value in enumerate(chosen)]
        check(mlx_generates, Body("f", ("a",), ("out",), ""), [mx.zeros(9)], [mx.float32], template)


def test_no_inputs(mlx_generates):
    check(mlx_generates, Body("f", (), ("out",), "out[0] = 1;"), [], [mx.float32])
    check(mlx_generates, Body("f", (), ("out", "o2"), "thread_position_in_grid"), [], [mx.float32, mx.int8])


def test_verbose_prints_what_mlx_prints(mlx_generates, capfd):
    arguments = dict(name="f", input_names=["a"], output_names=["out"], source="out[0] = a[0];")
    expected = mlx_generates(Body("f", ("a",), ("out",), "out[0] = a[0];"), [mx.zeros(9)], [mx.float32], None)
    lab.metal_kernel(**arguments)(
        inputs=[mx.zeros(9)], output_shapes=[(1,)], output_dtypes=[mx.float32], grid=(1, 1, 1),
        threadgroup=(1, 1, 1), verbose=True,
    )  # fmt: skip
    assert capfd.readouterr().out == expected
