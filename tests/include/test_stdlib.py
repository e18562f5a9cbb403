"""The Metal standard library headers, compiled by clang, run through llvmlite and compared with NumPy in float64."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
import ziglang

INCLUDE = Path(__file__).parents[2] / "lab" / "include"
HERE = Path(__file__).parent
CLANG = [str(Path(ziglang.__file__).with_name("zig")), "clang"]
ARCH = platform.machine()
FLAGS = [
    *["-x", "clcpp", "-cl-std=clc++2021", "-Xclang", "-cl-ext=+cl_khr_fp16", "-cl-single-precision-constant"],
    *["-cl-no-stdinc", "-fdeclspec", "-ffreestanding", "-nostdinc", "-fmax-type-align=4"],
    *["-fno-strict-aliasing", "-fno-finite-loops", "-ffp-contract=off", "-O2", "-fPIC"],
    *["-march=native" if ARCH == "x86_64" else "-mcpu=native", "-target", f"{ARCH}-linux-gnu"],
    *["-Wno-unknown-attributes", "-I", str(INCLUDE), "-I", str(HERE)],
]
SEED = int(os.environ.get("SEED", "20240601"))


@pytest.fixture(scope="session")
def pch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pch") / "metal.pch"
    options = ["-c", "-Xclang", "-emit-pch", "-fpch-instantiate-templates"]
    subprocess.run([*CLANG, *FLAGS, *options, str(INCLUDE / "metal_stdlib"), "-o", str(path)], check=True)
    return path


def clang(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLANG, *FLAGS, *options, "-"], input=source, capture_output=True, text=True)


class Unit:
    """A compiled source: `unit.f(*arrays, *numbers)` calls the extern "C" function f on the arrays' memory."""

    def __init__(self, source: str, pch: Path, tmp: Path) -> None:
        self.object = tmp / "unit.o"
        result = clang("using namespace metal;\n" + source, "-include-pch", str(pch), "-c", "-o", str(self.object))
        assert result.returncode == 0, result.stderr
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(jit=True)
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        self.engine.add_object_file(llvm.object_file.ObjectFileRef.from_path(str(self.object)))
        self.engine.finalize_object()

    def __getattr__(self, name: str) -> Callable[..., None]:
        address = self.engine.get_function_address(name)
        assert address, name

        def call(*args: np.ndarray | int) -> None:
            arrays = [isinstance(a, np.ndarray) for a in args]
            types = [ctypes.c_void_p if a else ctypes.c_long for a in arrays]
            values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
            ctypes.CFUNCTYPE(None, *types)(address)(*values)

        return call


@pytest.fixture(scope="module")
def build(pch: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Unit]:
    return lambda source: Unit(source, pch, tmp_path_factory.mktemp("unit"))


def loop(name: str, result: str, arguments: dict[str, str], expression: str) -> str:
    """An extern "C" function that sets out[i] to the expression in the arguments' elements, for i < n."""
    pointers = ", ".join(f"device const {t}* {a}_" for a, t in arguments.items())
    elements = " ".join(f"{t} {a} = {a}_[i];" for a, t in arguments.items())
    return (
        f'extern "C" void {name}({pointers}, device {result}* out, long n) {{\n'
        f"  for (long i = 0; i < n; i++) {{ {elements} out[i] = {expression}; }}\n}}\n"
    )


def apply(unit: Unit, name: str, dtype: np.dtype | type, *arrays: np.ndarray) -> np.ndarray:
    out = np.zeros(len(arrays[0]), dtype)
    getattr(unit, name)(*[np.ascontiguousarray(a) for a in arrays], out, len(out))
    return out


# ------------------------------------------------------------------------------------------------ elementary functions


def bfloat_bits(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat bits, rounded to nearest even."""
    u = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def bfloat_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def error_in_ulps(got: np.ndarray, want: np.ndarray, digits: int = 24, least: int = -149) -> np.ndarray:
    """|got - want| in units in the last place of a format with `digits` bits whose least denormal is 2**least.

    0 where both are NaN or the same infinity; infinite where one is and the other is not. A result that rounds to
    infinity counts against the largest finite number's ulp.
    """
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(want)
        ulp = np.ldexp(1.0, np.maximum(np.where(np.isfinite(want), exponent, 0) - digits, least))
        top = 2.0**128 if digits != 11 else 2.0**16
        finite = np.where(np.isinf(got) & np.isfinite(want), np.copysign(top, got), got.astype(np.float64))
        error = np.abs(finite - want) / ulp
        overflow = (np.abs(want) >= top * (1 - 2.0 ** -(digits + 1))) & np.isinf(got) & (np.sign(got) == np.sign(want))
    error[overflow | (np.isnan(got) & np.isnan(want)) | (got == want)] = 0
    error[np.isnan(got) != np.isnan(want)] = np.inf
    return error


def reduced(x: np.ndarray, f: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """f(pi x) after an exact reduction of x modulo 2."""
    return f(np.pi * np.fmod(x, 2.0))


def sinpi(x: np.ndarray) -> np.ndarray:
    r = np.fmod(x, 2.0)
    r = np.where(np.abs(r) > 1.5, r - np.copysign(2.0, r), r)
    r = np.where(np.abs(r) > 0.5, np.copysign(1.0, r) - r, r)
    return np.sin(np.pi * r)


def cospi(x: np.ndarray) -> np.ndarray:
    r = np.abs(np.fmod(x, 2.0))
    r = np.where(r > 1, 2 - r, r)
    return np.sin(np.pi * (0.5 - r))


def powr(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    bad = (x < 0) | np.isnan(x) | np.isnan(y) | ((y == 0) & ((x == 0) | np.isinf(x))) | ((x == 1) & np.isinf(y))
    return np.where(bad, np.nan, np.power(np.abs(x), y))


# Name, reference, and the error the MSL specification allows precise math (0.5: correctly rounded).
UNARY: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "acos": (np.arccos, 4),
    "acosh": (np.arccosh, 4),
    "asin": (np.arcsin, 4),
    "asinh": (np.arcsinh, 4),
    "atan": (np.arctan, 5),
    "atanh": (np.arctanh, 5),
    "ceil": (np.ceil, 0),
    "cos": (np.cos, 4),
    "cosh": (np.cosh, 4),
    "cospi": (cospi, 4),
    "exp": (np.exp, 4),
    "exp10": (lambda x: np.power(10.0, x), 4),
    "exp2": (np.exp2, 4),
    "fabs": (np.abs, 0),
    "floor": (np.floor, 0),
    "log": (np.log, 4),
    "log10": (np.log10, 4),
    "log2": (np.log2, 4),
    "rint": (np.rint, 0),
    "round": (lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), 0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 0.501),
    "sin": (np.sin, 4),
    "sinh": (np.sinh, 4),
    "sinpi": (sinpi, 4),
    "sqrt": (np.sqrt, 0.5),
    "tan": (np.tan, 6),
    "tanh": (np.tanh, 5),
    "tanpi": (lambda x: sinpi(x) / cospi(x), 6),
    "trunc": (np.trunc, 0),
}
BINARY: dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], float]] = {
    "atan2": (np.arctan2, 6),
    "copysign": (np.copysign, 0),
    "divide": (np.divide, 0.5),
    "fdim": (lambda x, y: np.where(x <= y, 0.0, x - y), 0.5),
    "fmax": (np.fmax, 0),
    "fmin": (np.fmin, 0),
    "fmod": (np.fmod, 0),
    "pow": (np.power, 16),
    "powr": (powr, 16),
}
EDGES = np.array(
    [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754942e-38, 1.1754944e-38, -1.1754944e-38, 3.4028235e38]
    + [-3.4028235e38, 1, -1, 0.5, -0.5, 1.5, -1.5, 2, -2, 2.5, 3, 4, 1e-40, 8388607.5, 8388608, 16777216, 0.99999994]
    + [1.0000001, 88.72284, -103.97208, 128, -149, -150, 38.53184, -44.85347, 1e10, -1e30],
    np.float32,
)


def float_samples(rng: np.random.Generator) -> np.ndarray:
    """Any bit pattern, the usual range, the neighbourhood of 1 and of the steps of trigonometric reductions."""
    return np.concatenate([
        EDGES,
        rng.integers(0, 2**32, 150_000, dtype=np.uint32).view(np.float32),
        rng.uniform(-1, 1, 50_000).astype(np.float32),
        rng.uniform(-100, 100, 100_000).astype(np.float32),
        rng.normal(1, 1e-4, 20_000).astype(np.float32),
        (np.arange(-2000, 2000) * (np.pi / 2)).astype(np.float32),
        (np.arange(-2000, 2000) * 0.25).astype(np.float32),
    ])


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    print(f"SEED={SEED}")
    return np.random.default_rng(SEED)


@pytest.fixture(scope="module")
def math_unit(build: Callable[[str], Unit]) -> Unit:
    source = ""
    for t in ("float", "half", "bfloat"):
        for f in UNARY:
            source += loop(f"{f}_{t}", t, {"x": t}, f"{f}(x)")
        for f in BINARY:
            source += loop(f"{f}_{t}", t, {"x": t, "y": t}, f"{f}(x, y)")
    return build(source)


def check(name: str, got: np.ndarray, want: np.ndarray, allowed: float, *args: np.ndarray, **ulp: int) -> None:
    error = error_in_ulps(got, want, **ulp)
    worst = int(np.argmax(error))
    at = ", ".join(repr(float(a[worst])) for a in args)
    message = f"{name}({at}) is {got[worst]!r}, want {want[worst]!r}: {error[worst]:.3f} ulp of {allowed} (SEED={SEED})"
    assert error[worst] <= allowed, message


@pytest.mark.parametrize("name", UNARY)
def test_unary_function_of_float_is_within_the_specification(name: str, math_unit: Unit, rng: np.random.Generator):
    reference, allowed = UNARY[name]
    x = float_samples(rng)
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64))
    got = apply(math_unit, f"{name}_float", np.float32, x)
    check(name, got, want, allowed, x)
    zero = (x == 0) & (want == 0)
    assert np.array_equal(np.signbit(got[zero]), np.signbit(want[zero])), "the sign of a zero"


@pytest.mark.parametrize("name", BINARY)
def test_binary_function_of_floats_is_within_the_specification(name: str, math_unit: Unit, rng: np.random.Generator):
    reference, allowed = BINARY[name]
    x = np.concatenate([np.repeat(EDGES, len(EDGES)), float_samples(rng), rng.uniform(0, 10, 50_000).astype(np.float32)])
    y = np.concatenate([np.tile(EDGES, len(EDGES)), rng.permutation(float_samples(rng)), rng.uniform(-40, 40, 50_000)])
    y = y.astype(np.float32)
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64), y.astype(np.float64))
    got = apply(math_unit, f"{name}_float", np.float32, x, y)
    check(name, got, want, allowed, x, y)


@pytest.mark.parametrize("name", UNARY)
def test_unary_function_of_every_half_and_bfloat_rounds_once(name: str, math_unit: Unit):
    reference, allowed = UNARY[name]
    bits = np.arange(65536).astype(np.uint16)
    half, bfloat = bits.view(np.float16), bfloat_values(bits)
    slack = 0.5 + allowed * 2.0**-10
    with np.errstate(all="ignore"):
        want = reference(half.astype(np.float64))
    got = apply(math_unit, f"{name}_half", np.float16, half)
    check(name, got, want, slack, half, digits=11, least=-24)
    with np.errstate(all="ignore"):
        want = reference(bfloat.astype(np.float64))
    got = bfloat_values(apply(math_unit, f"{name}_bfloat", np.uint16, bits))
    check(name, got, want, slack, bfloat, digits=8, least=-133)


@pytest.mark.parametrize("name", BINARY)
def test_binary_function_of_halves_and_bfloats_rounds_once(name: str, math_unit: Unit, rng: np.random.Generator):
    reference, allowed = BINARY[name]
    a, b = rng.integers(0, 65536, (2, 100_000)).astype(np.uint16)
    slack = 0.5 + allowed * 2.0**-10
    x, y = a.view(np.float16), b.view(np.float16)
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64), y.astype(np.float64))
    check(name, apply(math_unit, f"{name}_half", np.float16, x, y), want, slack, x, y, digits=11, least=-24)
    x, y = bfloat_values(a), bfloat_values(b)
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64), y.astype(np.float64))
    got = bfloat_values(apply(math_unit, f"{name}_bfloat", np.uint16, a, b))
    check(name, got, want, slack, x, y, digits=8, least=-133)
