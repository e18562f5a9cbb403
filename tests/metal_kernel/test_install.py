"""MLX while the lab stands in for its Metal, and after; gradients, compiled and vectorised functions."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import mlx.core as mx
import numpy as np
import pytest

import lab
from lab.mlxfast.stand_in import UncompiledWarning

pytestmark = pytest.mark.skipif(mx.metal.is_available(), reason="this MLX has Metal")

SQUARE = dict(
    name="square",
    input_names=["a"],
    output_names=["out"],
    source="uint i = thread_position_in_grid.x; out[i] = a[i] * a[i];",
)


def square(x, make=lab.metal_kernel, **more):
    return make(**SQUARE)(
        inputs=[x], grid=(x.size, 1, 1), threadgroup=(32, 1, 1), output_shapes=[x.shape],
        output_dtypes=[x.dtype], **more,
    )[0]  # fmt: skip


@pytest.fixture
def installed():
    with lab.installed():
        yield


def everything():
    owners = (mx, mx.fast, mx.metal, mx.random, mx.linalg, mx.fft, mx.array, mx.Stream, mx.ThreadLocalStream)
    return {(owner, name): value for owner in owners for name, value in vars(owner).items()}


def test_taking_it_out_restores_mlx_entirely():
    before = everything()
    with lab.installed():
        assert everything() != before
    after = everything()
    assert before.keys() == after.keys() and all(before[k] is after[k] for k in before)
    assert mx.default_device() == mx.cpu and not mx.metal.is_available()
    with pytest.raises(ValueError, match="during function transformations"):
        mx.compile(lambda x: x + x.item())(mx.array(1))  # compiles again


def test_installing_twice_is_installing_once():
    assert lab.install()
    assert not lab.install()
    with lab.installed():
        pass
    assert mx.metal.is_available()
    lab.uninstall()
    lab.uninstall()
    assert not mx.metal.is_available()


def test_packages_see_a_metal_machine(installed):
    assert mx.metal.is_available() and mx.is_available(mx.gpu) and mx.is_available(mx.cpu)
    assert mx.default_device() == mx.gpu and mx.default_device().type == mx.gpu
    assert mx.device_count(mx.gpu) == 1
    info = mx.device_info()
    assert info["architecture"].startswith("applegpu") and info["memory_size"] > 0
    assert mx.device_info(mx.cpu) != info == mx.metal.device_info() == mx.device_info(mx.gpu)
    assert mx.fast.metal_kernel is lab.metal_kernel


def test_devices_and_streams_are_told_apart(installed):
    x = mx.arange(4.0)
    with mx.stream(mx.cpu):
        assert mx.default_device() == mx.cpu
        assert square(x).tolist() == [0, 1, 4, 9]
    assert mx.default_device() == mx.gpu
    gpu, cpu = mx.new_stream(mx.gpu), mx.new_stream(mx.cpu)
    assert gpu.device == mx.gpu and cpu.device == mx.cpu and mx.default_stream(mx.gpu).device == mx.gpu
    for stream in (None, mx.gpu, mx.Device(mx.gpu), gpu, mx.default_stream(mx.gpu)):
        assert square(x, stream=stream).tolist() == [0, 1, 4, 9]
        with mx.stream(stream or mx.gpu):
            assert mx.default_device() == mx.gpu
    for stream in (mx.cpu, mx.Device(mx.cpu), cpu, mx.default_stream(mx.cpu)):
        with pytest.raises(ValueError, match=r"^\[metal_kernel\] Only supports the GPU\.$"):
            square(x, stream=stream)
    mx.set_default_device(mx.cpu)
    assert mx.default_device() == mx.cpu
    mx.set_default_device(mx.gpu)
    mx.synchronize(mx.default_stream(mx.gpu))
    mx.synchronize(mx.gpu)


def test_operations_take_the_gpu_as_their_stream(installed):
    x = mx.arange(4.0)
    assert mx.add(x, x, stream=mx.gpu).tolist() == [0, 2, 4, 6]
    assert mx.add(x, x, stream=mx.cpu).tolist() == [0, 2, 4, 6]
    assert x.sum(stream=mx.gpu).item() == 6
    assert mx.random.normal((3,), stream=mx.new_stream(mx.gpu)).shape == (3,)


def test_a_graph_with_a_kernel_can_be_exported(installed, tmp_path):
    mx.export_function(str(tmp_path / "graph.mlxfn"), lambda x: square(x), mx.zeros(9))
    assert (tmp_path / "graph.mlxfn").stat().st_size


def test_gradients_through_a_kernel_are_refused():
    x = mx.arange(4.0)
    with pytest.raises(ValueError, match=r"^\[Primitive::vjp\] Not implemented for CustomKernel\.$"):
        mx.grad(lambda v: square(v).sum())(x)
    with pytest.raises(ValueError, match=r"^\[Primitive::jvp\] Not implemented for CustomKernel\.$"):
        mx.jvp(square, [x], [x])
    assert mx.grad(lambda v: (mx.stop_gradient(square(v)) * v).sum())(x).tolist() == [0, 1, 4, 9]


def test_a_custom_function_brings_the_gradient():
    function = mx.custom_function(square)

    @function.vjp
    def vjp(primals, cotangents, outputs):
        return 2 * primals * cotangents

    assert mx.grad(lambda v: function(v).sum())(mx.arange(4.0)).tolist() == [0, 2, 4, 6]
    value, gradient = mx.value_and_grad(lambda v: mx.checkpoint(function)(v).sum())(mx.arange(4.0))
    assert value.item() == 14 and gradient.tolist() == [0, 2, 4, 6]


def test_vectorising_a_kernel_says_what_to_do():
    with pytest.raises(ValueError, match=r"Kernel 'square' was called under mx\.vmap .* axis of its"):
        mx.vmap(square)(mx.zeros((2, 3)))


def test_compiled_functions_run_uncompiled_with_one_warning():
    compiled_before = mx.compile(lambda x: square(x) + 1)
    lab.install()
    try:
        with pytest.warns(UncompiledWarning) as caught:
            first, second = (mx.compile(lambda x, n=n: square(x) + n, shapeless=True) for n in (1, 2))
            assert first(mx.arange(3.0)).tolist() == [1, 2, 5]
            assert second(mx.arange(3.0)).tolist() == [2, 3, 6]
        assert len(caught) == 1
        assert compiled_before(mx.arange(3.0)).tolist() == [1, 2, 5]
    finally:
        lab.uninstall()


def test_rope_and_gathered_products_are_those_of_a_gpu(installed, rng):
    x = mx.array(rng.standard_normal((1, 2, 5, 64))).astype(mx.bfloat16)
    arguments = dict(traditional=False, base=10000.0, scale=1.0, offset=3)
    wide = mx.fast.rope(x.astype(mx.float32), 64, **arguments)
    assert mx.array_equal(mx.fast.rope(x, 64, **arguments), wide.astype(mx.bfloat16))
    b = mx.array(rng.standard_normal((3, 64, 8))).astype(mx.bfloat16)
    out = mx.gather_mm(x[0, 0], b, rhs_indices=mx.array([2]))
    assert out.dtype == mx.bfloat16 and mx.allclose(out, (x[0, 0] @ b[2])[None], atol=0.1)


PACKAGE = """
    import mlx.core as mx
    KERNEL = mx.fast.metal_kernel(
        name="twice", input_names=["a"], output_names=["out"], source="out[0] = 2 * a[0];"
    ) if mx.metal.is_available() and mx.default_device() == mx.gpu else None

    def test_kernel():
        out = KERNEL(
            inputs=[mx.array([4.0])], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )
        assert out[0].item() == 8

    def test_compiled():
        assert mx.compile(lambda x: x + 1)(mx.array(1)).item() == 2
"""


def test_the_pytest_plugin_is_there_before_packages_ask(tmp_path):
    (tmp_path / "test_package.py").write_text(textwrap.dedent(PACKAGE))
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-p", "lab.pytest_plugin", "-q", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "2 passed" in done.stdout and "1 warning" in done.stdout, done.stdout + done.stderr


def test_importing_the_lab_changes_nothing():
    code = "import mlx.core as mx; a = dict(vars(mx)); import lab; assert a == dict(vars(mx))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inputs_of_numpy_and_results_in_numpy(installed):
    x = np.arange(5, dtype=np.float32)
    assert np.array_equal(np.asarray(square(mx.array(x), mx.fast.metal_kernel)), x * x)
