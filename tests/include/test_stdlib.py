"""The Metal standard library headers, compiled by clang, run here, compared with NumPy in float64."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ziglang

from lab.engines.cpu.native import Loaded
from lab.source import compiler

INCLUDE = Path(__file__).parents[2] / "lab" / "include"
HERE = Path(__file__).parent
CLANG = [str(Path(ziglang.__file__).with_name("zig")), "clang"]
FLAGS = [*compiler.language_flags(compiler.host(), "safe"), "-fPIC", "-I", str(INCLUDE), "-I", str(HERE)]
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
    """A compiled source: `unit.f(*arrays, *numbers)` calls the extern "C" function f on the arrays."""

    def __init__(self, source: str, header: list[str], options: tuple[str, ...], tmp: Path) -> None:
        self.object = tmp / "unit.o"
        source = "using namespace metal;\n" + source
        result = clang(source, *header, *options, "-c", "-o", str(self.object))
        assert result.returncode == 0, result.stderr
        exported = dict.fromkeys(re.findall(r'extern "C" void (\w+)\(', source))
        self.code = Loaded([self.object.read_bytes()], list(exported), {})

    def __getattr__(self, name: str) -> Callable[..., None]:
        address = self.code.address(name)

        def call(
            *args: np.ndarray | int, unit: Unit = self
        ) -> None:  # keeps the code in memory while it runs
            arrays = [isinstance(a, np.ndarray) for a in args]
            types = [ctypes.c_void_p if a else ctypes.c_long for a in arrays]
            values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
            ctypes.CFUNCTYPE(None, *types)(address)(*values)

        return call


Build = Callable[..., Unit]


@pytest.fixture(scope="module")
def build(pch: Path, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """build(source, *options): with the precompiled header; without it, if there are options of its own."""

    def make(source: str, *options: str) -> Unit:
        header = ["-include", "metal_stdlib"] if options else ["-include-pch", str(pch)]
        return Unit(source, header, options, tmp_path_factory.mktemp("unit"))

    return make


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


# --------------------------------------------------------------------------------------- elementary functions


def bfloat_bits(x: np.ndarray) -> np.ndarray:
    """float32 to bfloat bits, rounded to nearest even."""
    u = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def bfloat_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def error_in_ulps(got: np.ndarray, want: np.ndarray, digits: int = 24, least: int = -149) -> np.ndarray:
    """|got - want| in ulps of a format with `digits` bits whose least denormal is 2**least.

    0 where both are NaN or the same infinity; infinite where one is NaN and the other is not. An infinity in
    place of a finite number counts as the power of two above the largest one.
    """
    with np.errstate(all="ignore"):
        _, exponent = np.frexp(want)
        ulp = np.ldexp(1.0, np.maximum(np.where(np.isfinite(want), exponent, 0) - digits, least))
        top = 2.0**128 if digits != 11 else 2.0**16
        finite = np.where(np.isinf(got) & np.isfinite(want), np.copysign(top, got), got.astype(np.float64))
        error = np.abs(finite - want) / ulp
        overflow = (
            (np.abs(want) >= top * (1 - 2.0 ** -(digits + 1)))
            & np.isinf(got)
            & (np.sign(got) == np.sign(want))
        )
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
    bad = (
        (x < 0) | np.isnan(x) | np.isnan(y) | ((y == 0) & ((x == 0) | np.isinf(x))) | ((x == 1) & np.isinf(y))
    )
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
EDGES = np.fromstring(  # type: ignore[call-overload]
    "0 -0 inf -inf nan 1e-45 -1e-45 1.1754942e-38 1.1754944e-38 -1.1754944e-38 1e-40 3.4028235e38"
    " -3.4028235e38 1 -1 0.5 -0.5 1.5 -1.5 2 -2 2.5 3 4 8388607.5 8388608 16777216 0.99999994 1.0000001"
    " 1e10 -1e30 88.72284 -103.97208 128 -149 -150 38.53184 -44.85347",
    np.float32,
    sep=" ",
)


def float_samples(rng: np.random.Generator) -> np.ndarray:
    """Any bit pattern, the usual range, and the neighbourhoods of 1 and of multiples of pi/2 and 1/4."""
    return np.concatenate(
        [
            EDGES,
            rng.integers(0, 2**32, 150_000, dtype=np.uint32).view(np.float32),
            rng.uniform(-1, 1, 50_000).astype(np.float32),
            rng.uniform(-100, 100, 100_000).astype(np.float32),
            rng.normal(1, 1e-4, 20_000).astype(np.float32),
            (np.arange(-2000, 2000) * (np.pi / 2)).astype(np.float32),
            (np.arange(-2000, 2000) * 0.25).astype(np.float32),
        ]
    )


@pytest.fixture(scope="module")
def rng() -> np.random.Generator:
    print(f"SEED={SEED}")
    return np.random.default_rng(SEED)


@pytest.fixture(scope="module")
def math_unit(build: Build) -> Unit:
    source = ""
    for t in ("float", "half", "bfloat"):
        for f in UNARY:
            source += loop(f"{f}_{t}", t, {"x": t}, f"{f}(x)")
        for f in BINARY:
            source += loop(f"{f}_{t}", t, {"x": t, "y": t}, f"{f}(x, y)")
    return build(source)


def check(
    name: str, got: np.ndarray, want: np.ndarray, allowed: float, *args: np.ndarray, **ulp: int
) -> None:
    error = error_in_ulps(got, want, **ulp)
    worst = int(np.argmax(error))
    at = ", ".join(repr(float(a[worst])) for a in args)
    message = f"{name}({at}) is {got[worst]!r}, want {want[worst]!r}: {error[worst]:.3f} ulp of {allowed}"
    assert error[worst] <= allowed, f"{message} (SEED={SEED})"


@pytest.mark.parametrize("name", UNARY)
def test_unary_function_of_float_is_within_the_specification(
    name: str, math_unit: Unit, rng: np.random.Generator
) -> None:
    reference, allowed = UNARY[name]
    x = float_samples(rng)
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64))
    got = apply(math_unit, f"{name}_float", np.float32, x)
    check(name, got, want, allowed, x)
    zero = (x == 0) & (want == 0)
    assert np.array_equal(np.signbit(got[zero]), np.signbit(want[zero])), "the sign of a zero"


@pytest.mark.parametrize("name", BINARY)
def test_binary_function_of_floats_is_within_the_specification(
    name: str, math_unit: Unit, rng: np.random.Generator
) -> None:
    reference, allowed = BINARY[name]
    x = np.concatenate(
        [np.repeat(EDGES, len(EDGES)), float_samples(rng), rng.uniform(0, 10, 50_000).astype(np.float32)]
    )
    exponents = rng.uniform(-40, 40, 50_000).astype(np.float32)
    y = np.concatenate([np.tile(EDGES, len(EDGES)), rng.permutation(float_samples(rng)), exponents])
    with np.errstate(all="ignore"):
        want = reference(x.astype(np.float64), y.astype(np.float64))
    got = apply(math_unit, f"{name}_float", np.float32, x, y)
    check(name, got, want, allowed, x, y)


@pytest.mark.parametrize("name", UNARY)
def test_unary_function_of_every_half_and_bfloat_rounds_once(name: str, math_unit: Unit) -> None:
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
def test_binary_function_of_halves_and_bfloats_rounds_once(
    name: str, math_unit: Unit, rng: np.random.Generator
) -> None:
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


def test_functions_with_a_second_result(build: Build, rng: np.random.Generator) -> None:
    """sincos, frexp, modf, ldexp, ilogb, nextafter, fract."""
    unit = build(
        'extern "C" void sincos_f(device const float* x, device float2* out, long n) {'
        "  for (long i = 0; i < n; i++) { float c; float s = sincos(x[i], c); out[i] = float2(s, c); } }\n"
        'extern "C" void frexp_f(device const float* x, device float* m, device int* e, long n) {'
        "  for (long i = 0; i < n; i++) { int k; m[i] = frexp(x[i], k); e[i] = k; } }\n"
        'extern "C" void modf_f(device const float* x, device float2* out, long n) {'
        "  for (long i = 0; i < n; i++) { float w; float f = modf(x[i], w); out[i] = float2(f, w); } }\n"
        'extern "C" void vectors(device const float4* x, device float4* out, long n) {'
        "  float4 c, w; int4 e; out[0] = sincos(x[0], c); out[1] = c; out[2] = frexp(x[0], e);"
        " out[3] = float4(e);"
        "  out[4] = modf(x[0], w); out[5] = w; out[6] = ldexp(x[0], int4(1, 2, 3, -4));"
        " out[7] = ldexp(x[0], 2); }\n"
        + loop("ldexp_f", "float", {"x": "float", "k": "int"}, "ldexp(x, k)")
        + loop("ilogb_f", "int", {"x": "float"}, "ilogb(x)")
        + loop("nextafter_f", "float", {"x": "float", "y": "float"}, "nextafter(x, y)")
        + loop("nextafter_h", "half", {"x": "half", "y": "half"}, "nextafter(x, y)")
        + loop("fract_f", "float", {"x": "float"}, "fract(x)")
        + loop("fract_h", "half", {"x": "half"}, "fract(x)")
    )
    x = float_samples(rng)
    out = np.zeros((len(x), 2), np.float32)
    with np.errstate(all="ignore"):
        d = x.astype(np.float64)
        unit.sincos_f(x, out, len(x))
        check("sincos", out[:, 0], np.sin(d), 4, x)
        check("sincos", out[:, 1], np.cos(d), 4, x)
        unit.modf_f(x, out, len(x))
        fraction, whole = np.modf(x)
        np.testing.assert_array_equal(out, np.stack([fraction, whole], 1))
        mantissa, exponent = np.zeros_like(x), np.zeros(len(x), np.int32)
        unit.frexp_f(x, mantissa, exponent, len(x))
        want_mantissa, want_exponent = np.frexp(x)
        np.testing.assert_array_equal(mantissa, want_mantissa)
        np.testing.assert_array_equal(exponent, np.where(np.isfinite(x), want_exponent, 0))
        k = rng.integers(-330, 330, len(x)).astype(np.int32)
        np.testing.assert_array_equal(
            apply(unit, "ldexp_f", np.float32, x, k), np.ldexp(d, k).astype(np.float32)
        )
        plain = np.isfinite(x) & (x != 0)
        np.testing.assert_array_equal(apply(unit, "ilogb_f", np.int32, x)[plain], want_exponent[plain] - 1)
        y = np.roll(x, 1)
        np.testing.assert_array_equal(apply(unit, "nextafter_f", np.float32, x, y), np.nextafter(x, y))
        h = np.arange(65536).astype(np.uint16).view(np.float16)
        g = np.roll(h, 12345)
        np.testing.assert_array_equal(apply(unit, "nextafter_h", np.float16, h, g), np.nextafter(h, g))
        want = np.where(np.isinf(x), 0, np.minimum(x - np.floor(x), np.float32(1 - 2**-24)))
        np.testing.assert_array_equal(apply(unit, "fract_f", np.float32, x), want)
        f = h.astype(np.float32)
        want = np.where(np.isinf(f), 0, np.minimum(f - np.floor(f), np.float32(1 - 2**-11))).astype(
            np.float16
        )
        np.testing.assert_array_equal(apply(unit, "fract_h", np.float16, h), want)
    v = np.array([0.75, -3.25, 1e-3, 100.5], np.float32)
    out = np.zeros((8, 4), np.float32)
    unit.vectors(v, out, 1)
    m, e = np.frexp(v)
    f, w = np.modf(v)
    np.testing.assert_allclose(out[:2], [np.sin(v), np.cos(v)], rtol=3e-7)
    np.testing.assert_array_equal(out[2:], [m, e, f, w, np.ldexp(v, [1, 2, 3, -4]), np.ldexp(v, 2)])


# ------------------------------------------------------------------------------ common, relational, geometric


def test_common_functions_of_floats(build: Build, rng: np.random.Generator) -> None:
    x, y, z = (
        rng.permutation(np.concatenate([EDGES, rng.uniform(-3, 3, 5000).astype(np.float32)]))
        for _ in range(3)
    )
    cases: dict[str, np.ndarray] = {}
    with np.errstate(all="ignore"):
        cases["min(x, y)"] = cases["fmin(x, y)"] = np.fmin(x, y)
        cases["max(x, y)"] = cases["fmax(x, y)"] = np.fmax(x, y)
        cases["max(x, 0)"] = np.fmax(x, np.float32(0))
        cases["min3(x, y, z)"] = cases["fmin3(x, y, z)"] = np.fmin(np.fmin(x, y), z)
        cases["max3(x, y, z)"] = cases["fmax3(x, y, z)"] = np.fmax(np.fmax(x, y), z)
        cases["clamp(x, 0, 1)"] = cases["saturate(x)"] = np.fmin(np.fmax(x, 0), 1).astype(np.float32)
        cases["mix(x, y, z)"] = x + (y - x) * z
        cases["sign(x)"] = np.where(np.isnan(x), 0, np.sign(x)).astype(np.float32)
        cases["step(x, y)"] = np.where(y < x, 0, 1).astype(np.float32)
        t = np.fmin(np.fmax((z + 1) / np.float32(3), 0), 1).astype(np.float32)
        cases["smoothstep(-1.0f, 2.0f, z)"] = t * t * (3 - 2 * t)
        cases["abs(x)"] = np.abs(x)
        cases["fma(x, y, z)"] = (x.astype(np.longdouble) * y + z).astype(np.float32)
        cases["select(x, y, z > 0)"] = np.where(z > 0, y, x)
    source = "".join(loop(f"f{i}", "float", dict.fromkeys("xyz", "float"), e) for i, e in enumerate(cases))
    unit = build(source + loop("median", "float", dict.fromkeys("xyz", "float"), "median3(x, y, z)"))
    for i, (expression, want) in enumerate(cases.items()):
        got = apply(unit, f"f{i}", np.float32, x, y, z)
        np.testing.assert_array_equal(got, want, err_msg=f"{expression} (SEED={SEED})")
    a = rng.normal(size=(3, 1000)).astype(np.float32)
    np.testing.assert_array_equal(apply(unit, "median", np.float32, *a), np.median(a, axis=0))


def test_kinds_of_floats(build: Build) -> None:
    """isnan, isinf, isfinite, isnormal, signbit of every half and bfloat, of edges of float; fast math on."""
    names = ("isnan", "isinf", "isfinite", "isnormal", "signbit")
    types = ("float", "half", "bfloat")
    unit = build(
        "".join(loop(f"{f}_{t}", "bool", {"x": t}, f"{f}(x)") for f in names for t in types),
        *compiler.MATH["fast"],
    )
    bits = np.arange(65536).astype(np.uint16)
    tiny = {"float": 2.0**-126, "half": 2.0**-14, "bfloat": 2.0**-126}
    for t, raw, x in (
        ("float", EDGES, EDGES),
        ("half", bits, bits.view(np.float16)),
        ("bfloat", bits, bfloat_values(bits)),
    ):
        finite = np.isfinite(x)
        want = (np.isnan(x), np.isinf(x), finite, finite & (np.abs(x) >= tiny[t]), np.signbit(x))
        for f, w in zip(names, want, strict=True):
            np.testing.assert_array_equal(apply(unit, f"{f}_{t}", np.bool_, raw), w, err_msg=f"{f} of {t}")


def test_geometric_functions(build: Build, rng: np.random.Generator) -> None:
    a, b = rng.normal(size=(2, 200, 3))
    unit = build(
        "".join(
            f'extern "C" void g_{t}(device const packed_{t}3* a, device const packed_{t}3* b, device {t}* s,'
            f" device packed_{t}3* v, long n) {{ for (long i = 0; i < n; i++) {{ {t}3 p = a[i], q = b[i];"
            f" s += 6;"
            " s[-6] = dot(p, q); s[-5] = length(p); s[-4] = distance(p, q); s[-3] = length_squared(p);"
            " s[-2] = distance_squared(p, q); s[-1] = dot(a[i], q);"
            " v[0] = cross(p, q); v[1] = normalize(p); v[2] = reflect(p, q); v[3] = faceforward(p, q, p);"
            " v[4] = refract(normalize(p), normalize(q), 0.75f);"
            " v[5] = refract(normalize(p), normalize(q), 5.0f); v += 6; } }\n"
            for t in ("float", "half")
        )
    )
    for dtype, name, tol in ((np.float32, "float", 2e-5), (np.float16, "half", 2e-2)):
        x, y = a.astype(dtype), b.astype(dtype)
        p, q = x.astype(np.float64), y.astype(np.float64)
        dot = (p * q).sum(1)
        s, v = np.zeros((200, 6), dtype), np.zeros((200, 6, 3), dtype)
        getattr(unit, f"g_{name}")(x, y, s, v, 200)
        norm = np.linalg.norm(p, axis=1)
        d2 = ((p - q) ** 2).sum(1)
        want = np.stack([dot, norm, np.sqrt(d2), norm**2, d2, dot], 1)
        np.testing.assert_allclose(s, want, rtol=tol, atol=tol)
        i, m = p / norm[:, None], q / np.linalg.norm(q, axis=1)[:, None]
        cosine = (i * m).sum(1)[:, None]

        def refract(
            eta: float, i: np.ndarray = i, m: np.ndarray = m, cosine: np.ndarray = cosine
        ) -> np.ndarray:
            k = 1 - eta**2 * (1 - cosine**2)
            return np.where(k < 0, 0, eta * i - (eta * cosine + np.sqrt(np.maximum(k, 0))) * m)

        want_v = np.stack(
            [
                np.cross(p, q),
                i,
                p - 2 * dot[:, None] * q,
                np.where(dot[:, None] < 0, p, -p),
                refract(0.75),
                refract(5.0),
            ],
            1,
        )
        far = np.abs(1 - 25 * (1 - cosine[:, 0] ** 2)) > 0.1  # away from the edge of total reflection
        np.testing.assert_allclose(v[far], want_v[far], rtol=tol * 10, atol=tol * 10)


# --------------------------------------------------------------------------------------------------- integers

INTEGERS: dict[str, Any] = {
    **{"char": np.int8, "uchar": np.uint8, "short": np.int16, "ushort": np.uint16},
    **{"int": np.int32, "uint": np.uint32, "long": np.int64, "ulong": np.uint64},
}


VECTORS = ("uchar", "int", "long")  # types whose functions are tested on vectors, too


def wrap(x: int, dtype: type) -> int:
    bits = np.iinfo(dtype).bits
    x &= (1 << bits) - 1
    return x - (1 << bits) if np.iinfo(dtype).min < 0 and x >> (bits - 1) else x


def integer_cases(dtype: type) -> dict[str, Callable[[int, int, int], int]]:
    """Expressions in x, y, z and what they give in Python's integers, before wrapping to the type."""
    info = np.iinfo(dtype)
    bits, lo, hi = info.bits, int(info.min), int(info.max)
    mask = (1 << bits) - 1

    def clip(v: int) -> int:
        return min(max(v, lo), hi)

    def rotate(v: int, n: int) -> int:
        n %= bits
        return (v & mask) << n | (v & mask) >> (bits - n)

    def extract(v: int, offset: int, count: int) -> int:
        part = (v & mask) >> offset & ((1 << count) - 1)
        return part - (1 << count) if lo < 0 and count and part >> (count - 1) else part

    def insert(base: int, v: int, offset: int, count: int) -> int:
        field = ((1 << count) - 1) << offset
        return base & ~field | (v << offset) & field

    return {
        "abs(x)": lambda x, y, z: abs(x),
        "addsat(x, y)": lambda x, y, z: clip(x + y),
        "subsat(x, y)": lambda x, y, z: clip(x - y),
        "clamp(x, min(y, z), max(y, z))": lambda x, y, z: min(max(x, min(y, z)), max(y, z)),
        "clz(x)": lambda x, y, z: bits - (x & mask).bit_length(),
        "ctz(x)": lambda x, y, z: ((x & mask) & -(x & mask)).bit_length() - 1 if x else bits,
        "extract_bits(x, 3, 4)": lambda x, y, z: extract(x, 3, 4),
        f"extract_bits(x, 0, {bits})": lambda x, y, z: x,
        "extract_bits(x, 2, 0)": lambda x, y, z: 0,
        "insert_bits(x, y, 3, 4)": lambda x, y, z: insert(x, y, 3, 4),
        f"insert_bits(x, y, 0, {bits})": lambda x, y, z: y,
        "hadd(x, y)": lambda x, y, z: (x + y) >> 1,
        "rhadd(x, y)": lambda x, y, z: (x + y + 1) >> 1,
        "madhi(x, y, z)": lambda x, y, z: (x * y >> bits) + z,
        "madsat(x, y, z)": lambda x, y, z: clip(x * y + z),
        "max3(x, y, z)": lambda x, y, z: max(x, y, z),
        "median3(x, y, z)": lambda x, y, z: sorted((x, y, z))[1],
        "min3(x, y, z)": lambda x, y, z: min(x, y, z),
        "mulhi(x, y)": lambda x, y, z: x * y >> bits,
        "popcount(x)": lambda x, y, z: (x & mask).bit_count(),
        "reverse_bits(x)": lambda x, y, z: int(f"{x & mask:0{bits}b}"[::-1], 2),
        "rotate(x, y)": rotate_case(rotate),
        "absdiff(x, y)": lambda x, y, z: abs(x - y),
        "x << (y & 7)": lambda x, y, z: x << (y & 7),
        "mad24(x, y, z)": lambda x, y, z: x * y + z,
    }


def rotate_case(rotate: Callable[[int, int], int]) -> Callable[[int, int, int], int]:
    return lambda x, y, z: rotate(x, y)


def test_integer_functions_of_every_type(build: Build, rng: np.random.Generator) -> None:
    source = ""
    for t, dtype in INTEGERS.items():
        for i, expression in enumerate(integer_cases(dtype)):
            source += loop(f"f{i}_{t}", t, dict.fromkeys("xyz", t), f"{t}({expression})")
            if t in VECTORS:
                vector = re.sub(r"\b([xyz])\b", rf"{t}3(\1)", expression)
                source += loop(f"v{i}_{t}", t, dict.fromkeys("xyz", t), f"{t}3({vector}).z")
    unit = build(source, "-O0")
    for t, dtype in INTEGERS.items():
        info = np.iinfo(dtype)
        edges = np.array([info.min, info.min + 1, info.max, info.max - 1, 0, 1, 2, 5, 100], dtype)
        grid = np.array(list(itertools.product(edges, repeat=3)), dtype).T
        random = rng.integers(info.min, info.max, (3, 300), dtype, endpoint=True)
        x, y, z = np.concatenate([grid, random], 1)
        for i, (expression, reference) in enumerate(integer_cases(dtype).items()):
            want = [wrap(reference(*map(int, v)), dtype) for v in zip(x, y, z, strict=True)]
            for form in "fv" if t in VECTORS else "f":
                got = apply(unit, f"{form}{i}_{t}", dtype, x, y, z)
                np.testing.assert_array_equal(
                    got, np.array(want, dtype), err_msg=f"{expression} of {t} (SEED={SEED})"
                )


def test_literals_of_another_type_meet_as_usual_arithmetic_does(build: Build) -> None:
    checks = {
        "max(f, 0)": "float",
        "min(u, 3)": "uint",
        "clamp(f, 0, 1)": "float",
        "max(s, s)": "short",
        "pow(f, 2)": "float",
        "max(h, 0)": "half",
        "max(h, f)": "float",
        "min(b, 1)": "bfloat",
        "max(b, f)": "float",
        "sqrt(2)": "float",
        "max(f4, 0)": "float4",
        "clamp(f4, 0, f)": "float4",
        "min(3, i4)": "int4",
        "fma(f, 2, 1)": "float",
        "mix(f4, f4, 0.5f)": "float4",
        "max(p3, p3)": "float3",
        "normalize(p3)": "float3",
        "exp(p3)": "float3",
        "absdiff(i, 3)": "uint",
        "abs(i)": "int",
        "exp(b)": "bfloat",
        "isnan(f4)": "bool4",
        "select(f, 0, i > 0)": "float",
        "select(i4, 0, f4 > 0)": "int4",
        "f4 * 2": "float4",
        "2 * i4": "int4",
        "h4 * 2": "half4",
        "f4 < 1": "bool4",
        "p3 * 2": "float3",
        "p3 + p3": "float3",
        "-p3": "float3",
        "b4 * b": "bfloat4",
        "!f4": "bool4",
        "h + 1": "half",
        "b * 2": "bfloat",
        "b * f": "float",
        "b4 < b4": "bool4",
        "f4.xy": "float2",
        "f4.xyz[1]": "float",
        "sign(h4)": "half4",
        "dot(f4, f4)": "float",
        "dot(h4, h4)": "half",
        "length(p3)": "float",
        "ilogb(h4)": "int4",
        "all(f4 > 0)": "bool",
        "as_type<uint>(f)": "uint",
        "as_type<float3>(uint3(i))": "float3",
        "metal::precise::exp(f)": "float",
        "metal::fast::max(h, h)": "half",
        "popcount(u4)": "uint4",
        "float4(h4)": "float4",
        "int4(f4) & 3": "int4",
    }
    declared = (
        "float f = 1; half h = 1; bfloat b = 1; int i = 1; uint u = 1; short s = 1; float4 f4 = 1;"
        " half4 h4 = 1;"
        " bfloat4 b4 = b; int4 i4 = 1; uint4 u4 = 1; packed_float3 p3(1.0f);"
    )
    asserts = "".join(f'static_assert(is_same_v<decltype({e}), {t}>, "{e}");\n' for e, t in checks.items())
    asserts = re.sub(
        r"decltype\((\w+\.xyz\[1\]|.*?)\), (\w+)>, \"", r'remove_reference_t<decltype(\1)>, \2>, "', asserts
    )
    build(f"void f() {{ {declared}\n{asserts} }}")


# ------------------------------------------------------------------------------------------- types, operators


def test_layout_of_types(build: Build) -> None:
    sizes = {
        "bool": 1,
        "char": 1,
        "uchar": 1,
        "short": 2,
        "ushort": 2,
        "half": 2,
        "bfloat": 2,
        "int": 4,
        "uint": 4,
    }
    sizes |= {"float": 4, "long": 8, "ulong": 8}
    lines = ["struct S { float a; float3 b; float c; half h; half4 d; packed_float3 e; bool3 f; };"]
    lines += [
        "static_assert(sizeof(S) == 64 && __builtin_offsetof(S, c) == 32 && __builtin_offsetof(S, d) == 40);"
    ]
    lines += ["static_assert(__builtin_offsetof(S, e) == 48 && __builtin_offsetof(S, f) == 60);"]
    for t, size in sizes.items():
        lines.append(f"static_assert(sizeof({t}) == {size} && alignof({t}) == {size});")
        for n in (2, 3, 4):
            whole = size * (4 if n == 3 else n)
            lines.append(f"static_assert(sizeof({t}{n}) == {whole} && alignof({t}{n}) == {whole});")
            lines.append(
                f"static_assert(sizeof(packed_{t}{n}) == {size * n} && alignof(packed_{t}{n}) == {size});"
            )
            for name in (f"{t}{n}", f"packed_{t}{n}"):
                lines.append(f"static_assert(is_trivial_v<{name}> && is_same_v<{name}, metal::{name}>);")
            lines.append(f"union U_{t}{n} {{ {t}{n} v; {t} e[{n}]; uint u; }};")
    for t in ("float", "half"):
        for c, r in itertools.product((2, 3, 4), repeat=2):
            lines.append(f"static_assert(sizeof({t}{c}x{r}) == {c} * sizeof({t}{r}));")
    build("\n".join(lines))


def swizzles(n: int) -> list[str]:
    """Every swizzle of n components; of four (340 by now) those in colour names only up to length two."""
    names = ["".join(p) for k in (1, 2, 3, 4) for p in itertools.product("xyzw"[:n], repeat=k)]
    return names + [s.translate(str.maketrans("xyzw", "rgba")) for s in names if n < 4 or len(s) < 3]


def test_every_swizzle_reads_and_those_without_repeats_write(build: Build) -> None:
    """In device memory and in a local variable; for a byte, a bfloat and a float type and bool."""
    source, calls = "", []
    for t, n in (("float", 4), ("uchar", 3), ("bfloat", 3), ("bool", 3), ("float", 2)):
        body = ""
        for s in swizzles(n):
            k = len(s)
            fill = "; ".join(f"out[{i}] = {'r' if k == 1 else f'r[{i}]'}" for i in range(k))
            kind = t if k == 1 else f"{t}{k}"
            body += f"  {{ {kind} r = v.{s}; {fill}; out += {k}; }}\n"
            if len(set(s)) == k:
                body += f"  {{ {t}{n} w = v; w.{s} = q.{s}; d[0] = v; d[0].{s} = q.{s};"
                body += " ".join(f" out[{i}] = w[{i}]; out[{n + i}] = d[0][{i}];" for i in range(n))
                body += f" out += {2 * n}; }}\n"
        name = f"{t}{n}"
        source += f'extern "C" void s_{name}(device const {name}* a, device {name}* d, device {t}* out) {{\n'
        source += f"  {name} v = a[0], q = a[1];\n{body}}}\n"
        calls.append((t, n))
    unit = build(source, "-O0")
    dtypes: dict[str, Any] = {"float": np.float32, "uchar": np.uint8, "bfloat": np.uint16, "bool": np.bool_}
    for t, n in calls:
        values = np.arange(1, 2 * n + 1).reshape(2, n)
        if t == "bfloat":
            data = bfloat_bits(values.astype(np.float32))
        else:
            data = (values % 2 if t == "bool" else values).astype(dtypes[t])
        a = np.zeros((2, 4 if n == 3 else n), dtypes[t])
        a[:, :n] = data
        want: list[np.ndarray] = []
        for s in swizzles(n):
            index = ["xyzwrgba".index(c) % 4 for c in s]
            want.append(data[0][index])
            if len(set(s)) == len(s):
                written = data[0].copy()
                written[index] = data[1][index]
                want += [written, written]
        flat = np.concatenate(want)
        out = np.zeros(len(flat), dtypes[t])
        getattr(unit, f"s_{t}{n}")(a, np.zeros_like(a), out)
        np.testing.assert_array_equal(out, flat, err_msg=f"{t}{n}")


def test_constructors_and_conversions(build: Build) -> None:
    expressions = {
        "float4(1)": [1, 1, 1, 1],
        "float4(1, 2, 3, 4)": [1, 2, 3, 4],
        "float4(a.xy, b.xy)": [1, 2, 5, 6],
        "float4(a.xyz, 9)": [1, 2, 3, 9],
        "float4(9, a.yzw)": [9, 2, 3, 4],
        "float4(a.zw, 7, 8)": [3, 4, 7, 8],
        "float4(7, a.xy, 8)": [7, 1, 2, 8],
        "float4(7, 8, a.xy)": [7, 8, 1, 2],
        "float4(float3(a.xy, 5), 6)": [1, 2, 5, 6],
        "float4(float3(5, a.zw), 6)": [5, 3, 4, 6],
        "float4(int4(-1.5f, 2.7f, 3, 4))": [-1, 2, 3, 4],
        "float4(half4(a))": [1, 2, 3, 4],
        "float4(bfloat4(a) + bfloat4(b))": [6, 8, 10, 12],
        "float4(bool4(a - 2))": [1, 0, 1, 1],
        "float4(uchar4(a * 60))": [60, 120, 180, 240],
        "float4(packed_float3(b.xyz), 1)": [5, 6, 7, 1],
        "float4(vec<float, 4>(a))": [1, 2, 3, 4],
        "float4{1, 2, 3, 4}": [1, 2, 3, 4],
        "float4(bool4(true, false, 1, 0))": [1, 0, 1, 0],
        "float4(as_type<uint4>(a) >> 23)": [127, 128, 128, 129],
        "float4(packed_half4(half4(b)))": [5, 6, 7, 8],
        "f.s.wzyx": [4, 3, 2, 1],
        "float4(select(a, b, bool4(1, 0, 0, 1)))": [5, 2, 3, 8],
        "twice(a).yyyy": [4, 4, 4, 4],
        "-a + +b": [4, 4, 4, 4],
        "float4(~int4(a))": [-2, -3, -4, -5],
        "float4(!(a > 2))": [1, 1, 0, 0],
        "float4(a < 3 && b > 5)": [0, 1, 0, 0],
        "float4(a == 3 || b == 5)": [1, 0, 1, 0],
        "float4(int4(a) % 3)": [1, 2, 0, 1],
        "float4((int4(a) << 2) | 1)": [5, 9, 13, 17],
        "float4(int4(a) ^ int4(b))": [4, 4, 4, 12],
        "2 / a": [2, 1, 2 / 3, 0.5],
        "a / 2": [0.5, 1, 1.5, 2],
        "updated(a, b)": [1, 12, 10, 10],
        "float4(m[1], m[0].y)": [4, 5, 6, 2],
        "transpose(float4x4(a, b, a, b))[1]": [2, 6, 2, 6],
        "c + 1": [11, 12, 13, 14],
        "float4(table[1], 0)": [4, 5, 6, 0],
    }
    source = (
        "struct F { float4 s; }; template <class T> T twice(T x) { return x * 2; }\n"
        "float4 updated(float4 a, float4 b) { a.xy += b.zw; a.z *= 3; a.w++; a.wz += 5;"
        " a.yz -= float2(-2, 4);"
        " a.x = b.x - a.x + 4; --a.x; a.x -= -1; return a; }\n"
        "constexpr float4 c(10, 11, 12, 13); static_assert((float4(1, 2, 3, 4) + 1).wz[0] == 5);\n"
        "static const float3 table[2] = {float3(1, 2, 3), float3(4, 5, 6)};\n"
        'extern "C" void f(device float4* out) { float4 a(1, 2, 3, 4), b(5, 6, 7, 8); F f = {a};'
        " float2x3 m(1, 2, 3, 4, 5, 6);\n"
        + "".join(f"  out[{i}] = {e};\n" for i, e in enumerate(expressions))
        + "}\n"
    )
    out = np.zeros((len(expressions), 4), np.float32)
    build(source).f(out)
    for (e, want), got in zip(expressions.items(), out, strict=True):
        np.testing.assert_array_equal(got, np.array(want, np.float32), err_msg=e)


def test_vectors_in_templates_that_depend_on_their_type(build: Build) -> None:
    unit = build(
        "struct Own { int v; }; Own operator+=(thread Own& a, Own b) { a.v += b.v; return a; }\n"
        "template <class T> vec<T, 4> components(vec<T, 4> v, vec<T, 2> q) {\n"
        "  v.x += q.y; v.y -= 1; v.z++; --v.w; v.w <<= 1; v[2] *= q.x; return v; }\n"
        "template <class T> vec<T, 4> swizzles(vec<T, 4> v, vec<T, 2> q) {\n"
        "  auto a = v.xy * 2 - q.yx; auto b = -v.zw + 3 * q.xy; a -= q; v.xy *= q.yx; v.zw = -v.wz;\n"
        "  if (any(v.xy < v.zw) || !all(v.xy == v.xy)) return vec<T, 4>(0);\n"
        "  return vec<T, 4>(a, b) + v.xyzw; }\n"
        'extern "C" void f(device int4* out) {\n'
        "  out[0] = components(int4(1, 2, 3, 4), int2(10, 20)); out[1] = swizzles(out[0], int2(10, 20)); }"
    )
    out = np.zeros((2, 4), np.int32)
    unit.f(out)
    v, q = np.array([21, 1, 40, 6]), np.array([10, 20])
    np.testing.assert_array_equal(out[0], v)
    want = np.concatenate([v[:2] * 2 - q[::-1] - q + v[:2] * q[::-1], -v[2:] + 3 * q - v[:1:-1]])
    np.testing.assert_array_equal(out[1], want)


@pytest.mark.parametrize("t", ["float", "half", "bfloat", *INTEGERS])
def test_vector_operators_agree_with_scalar_ones(t: str, build: Build, rng: np.random.Generator) -> None:
    real = t in ("float", "half", "bfloat")
    operators = ["+", "-", "*", "/", "<", "<=", ">", ">=", "==", "!="] + (
        [] if real else ["%", "&", "|", "^", "<<", ">>"]
    )
    body = ""
    for op in operators:
        kind = "bool" if op in ("<", "<=", ">", ">=", "==", "!=") else t
        for n in (2, 3, 4):
            components = ", ".join(f"{kind}(a{n}[{i}] {op} b{n}[{i}])" for i in range(n))
            scalars = ", ".join(f"{kind}(a{n}[{i}] {op} b)" for i in range(n))
            body += f"    ok &= all((a{n} {op} b{n}) == {kind}{n}({components}));\n"
            body += f"    ok &= all((a{n} {op} b) == {kind}{n}({scalars}));\n"
            if kind == t:
                body += f"    {{ auto c = a{n}; c {op}= b{n}; ok &= all(c == {t}{n}({components})); }}\n"
                body += f"    {{ packed_{t}{n} c = a{n}; c {op}= b{n};"
                body += f" ok &= all({t}{n}(c) == {t}{n}({components})); }}\n"
    values = (1 + rng.integers(0, 100, (64, 8))).astype(np.int64)
    low = 0 if t.startswith("u") else -60
    a, b = values[:, :4] + low, values[:, 4:] % 7 + 1
    unit = build(
        f'extern "C" void f(device const long4* pa, device const long4* pb, device int* out, long n) {{\n'
        f"  for (long i = 0; i < n; i++) {{ {t}4 a4 = {t}4(pa[i]), b4 = {t}4(pb[i]);"
        f" {t}3 a3 = a4.xyz, b3 = b4.xyz;\n"
        f"    {t}2 a2 = a4.xy, b2 = b4.xy; {t} b = b4.w; bool ok = true;\n{body}    out[i] = ok; }}\n}}\n"
    )
    out = np.zeros(64, np.int32)
    unit.f(np.ascontiguousarray(a), np.ascontiguousarray(b), out, 64)
    assert out.all(), f"SEED={SEED}"


def test_bfloat_rounds_to_nearest_even_and_computes_like_a_float(
    build: Build, rng: np.random.Generator
) -> None:
    unit = build(
        loop("make", "bfloat", {"x": "float"}, "bfloat(x)")
        + loop("back", "float", {"x": "bfloat"}, "x")
        + loop("vector", "bfloat", {"x": "float"}, "bfloat4(float4(x)).w")
        + "".join(
            loop(f"op{i}", "bfloat", {"x": "bfloat", "y": "bfloat"}, f"x {op} y")
            for i, op in enumerate("+-*/")
        )
        + loop("mixed", "float", {"x": "bfloat", "f": "float"}, "x * f + 1")
        + loop("whole", "bfloat", {"x": "bfloat", "f": "float"}, "x * 2 + 1")
        + loop("negative", "bfloat", {"x": "bfloat"}, "-x")
    )
    x = float_samples(rng)
    np.testing.assert_array_equal(
        bfloat_values(apply(unit, "make", np.uint16, x)), bfloat_values(bfloat_bits(x))
    )
    np.testing.assert_array_equal(
        bfloat_values(apply(unit, "vector", np.uint16, x)), bfloat_values(bfloat_bits(x))
    )
    bits = np.arange(65536).astype(np.uint16)
    np.testing.assert_array_equal(apply(unit, "back", np.float32, bits), bfloat_values(bits))
    np.testing.assert_array_equal(apply(unit, "negative", np.uint16, bits), bits ^ 0x8000)
    a, b = bits, rng.permutation(bits)
    u, v = bfloat_values(a), bfloat_values(b)
    with np.errstate(all="ignore"):
        for i, want in enumerate((u + v, u - v, u * v, u / v)):
            got = bfloat_values(apply(unit, f"op{i}", np.uint16, a, b))
            np.testing.assert_array_equal(got, bfloat_values(bfloat_bits(want)))
        np.testing.assert_array_equal(apply(unit, "mixed", np.float32, a, v), u * v + 1)
        twice = bfloat_values(bfloat_bits(u * 2))
        want = bfloat_values(bfloat_bits(twice + 1))
        np.testing.assert_array_equal(bfloat_values(apply(unit, "whole", np.uint16, a, v)), want)


def test_matrices(build: Build, rng: np.random.Generator) -> None:
    """C columns of R rows lie in memory as rows of an array of shape (C, R)."""
    source = ""
    for c, r in itertools.product((2, 3, 4), repeat=2):
        source += (
            f'extern "C" void m{c}{r}(device const float* a, device const float* b, device float* out) {{\n'
            f"  float{c}x{r} m, k; float{r}x{c} t; float{c} x; float{r} y;\n"
            f"  for (int i = 0; i < {c}; i++) for (int j = 0; j < {r}; j++)"
            f" {{ m[i][j] = a[i * {r} + j]; k[i][j] = b[i * {r} + j]; }}\n"
            f"  for (int i = 0; i < {c}; i++) x[i] = a[i]; for (int j = 0; j < {r}; j++) y[j] = b[j];\n"
            f"  t = transpose(k); float{r} mx = m * x; float{c} ym = y * m; auto mt = m * t;"
            f" auto s = (m + k) * 2 - -m;\n"
            f"  for (int j = 0; j < {r}; j++) *out++ = mx[j]; for (int i = 0; i < {c}; i++) *out++ = ym[i];\n"
            f"  for (int i = 0; i < {r}; i++) for (int j = 0; j < {r}; j++) *out++ = mt[i][j];\n"
            f"  for (int i = 0; i < {c}; i++) for (int j = 0; j < {r}; j++) *out++ = s[i][j];\n"
            f"  *out++ = (m == m) && (m != k);\n" + ("  *out++ = determinant(m);\n" if c == r else "") + "}\n"
        )
    unit = build(source)
    for c, r in itertools.product((2, 3, 4), repeat=2):
        a, b = rng.normal(size=(2, c, r)).astype(np.float32)
        m, k, x, y = a.T, b.T, a.ravel()[:c], b.ravel()[:r]
        want = [m @ x, y @ m, (m @ k.T).T.ravel(), (3 * a + 2 * b).ravel(), [1]]
        if c == r:
            want.append([np.linalg.det(m.astype(np.float64))])
        flat = np.concatenate(want)
        out = np.zeros(len(flat), np.float32)
        getattr(unit, f"m{c}{r}")(np.ascontiguousarray(a), np.ascontiguousarray(b), out)
        np.testing.assert_allclose(out, flat, rtol=2e-5, atol=2e-5, err_msg=f"{c}x{r} (SEED={SEED})")


def test_packing(build: Build, rng: np.random.Generator) -> None:
    formats = {
        "snorm4x8": [(8, i * 8, True) for i in range(4)],
        "unorm4x8": [(8, i * 8, False) for i in range(4)],
        "snorm2x16": [(16, 0, True), (16, 16, True)],
        "unorm2x16": [(16, 0, False), (16, 16, False)],
        "unorm10a2": [(10, 0, False), (10, 10, False), (10, 20, False), (2, 30, False)],
        "unorm565": [(5, 0, False), (6, 5, False), (5, 11, False)],
    }
    source = ""
    for f, fields in formats.items():
        n = len(fields)
        load = ", ".join(f"x[i * {n} + {k}]" for k in range(n))
        source += (
            f'extern "C" void pack_{f}(device const float* x, device uint* out, device float* back, long n)'
            " {\n"
            f"  for (long i = 0; i < n; i++) {{ float{n} v({load}); uint u = pack_float_to_{f}(v);"
            f" out[2 * i] = u;\n"
            f"    out[2 * i + 1] = pack_half_to_{f}(half{n}(v)); float{n} w = unpack_{f}_to_float(u);\n"
            f"    half{n} h = unpack_{f}_to_half(u); float worst = 0;\n"
            f"    for (int k = 0; k < {n}; k++) {{ back[i * {n} + k] = w[k];"
            f" worst = max(worst, abs(w[k] - h[k])); }}\n"
            f"    if (worst > 1e-3f) back[i * {n}] = 99; }}\n}}\n"
        )
    source += (
        'extern "C" void srgb(device const float* x, device float* out, long n) { for (long i = 0; i < n;'
        " i++)"
        " out[i] = unpack_unorm4x8_srgb_to_float(pack_float_to_srgb_unorm4x8(float4(x[i]))).x; }\n"
    )
    unit = build(source)
    for f, fields in formats.items():
        n = len(fields)
        x = rng.uniform(-1.2, 1.2, (500, n)).astype(np.float32)
        x[0], x[1], x[2] = np.nan, np.inf, -np.inf
        out, back = np.zeros((500, 2), np.uint32), np.zeros((500, n), np.float32)
        getattr(unit, f"pack_{f}")(x, out, back, 500)
        want = np.zeros((2, 500), np.uint64)
        with np.errstate(over="ignore"):
            forms = (x, x.astype(np.float16).astype(np.float32))
        for row, v in enumerate(forms):
            for k, (bits, shift, signed) in enumerate(fields):
                scale = np.float32(2 ** (bits - signed) - 1)
                number = np.rint(
                    np.clip(np.nan_to_num(v[:, k], posinf=9, neginf=-9), -1 if signed else 0, 1) * scale
                )
                field = number.astype(np.int64) & (2**bits - 1)
                want[row] |= field.astype(np.uint64) << np.uint64(shift)
                if row == 0:
                    np.testing.assert_allclose(back[:, k], number / scale, rtol=1e-6, err_msg=f)
        np.testing.assert_array_equal(out.T, want, err_msg=f)
    x = np.linspace(0, 1, 256).astype(np.float32)
    out = np.zeros_like(x)
    unit.srgb(x, out, 256)
    np.testing.assert_allclose(out, x, atol=0.005)


def test_limits_and_traits(build: Build) -> None:
    limits = {
        "numeric_limits<int>::max()": "2147483647",
        "numeric_limits<int>::min()": "-2147483647 - 1",
        "numeric_limits<uchar>::max()": "255",
        "numeric_limits<char>::lowest()": "-128",
        "numeric_limits<long>::max()": "9223372036854775807",
        "numeric_limits<ulong>::max()": "18446744073709551615ul",
        "numeric_limits<short>::digits": "15",
        "numeric_limits<float>::max()": "0x1.fffffep127f",
        "numeric_limits<float>::lowest()": "-FLT_MAX",
        "numeric_limits<float>::epsilon()": "0x1p-23f",
        "numeric_limits<float>::denorm_min()": "0x1p-149f",
        "numeric_limits<float>::infinity()": "INFINITY",
        "numeric_limits<half>::max()": "65504.0h",
        "numeric_limits<half>::min()": "0x1p-14h",
        "numeric_limits<bfloat>::max()": "0x1.fep127f",
        "numeric_limits<bfloat>::epsilon()": "0x1p-7f",
        "numeric_limits<bool>::max()": "true",
        "numeric_limits<half>::digits": "11",
        "INT_MIN": "-2147483647 - 1",
        "M_PI_F": "3.14159265f",
        "M_PI_H": "3.140625h",
        "sizeof(atomic_uint)": "4",
        "HALF_MAX": "65504.0h",
        "array<int, 3>().size()": "3",
        "rank_v<int[2][3]>": "2",
    }
    traits = [
        "is_same_v<int, int>",
        "!is_same_v<int, uint>",
        "is_floating_point_v<bfloat>",
        "is_floating_point<half>::value",
        "!is_integral_v<float>",
        "is_integral<const uchar>::value",
        "is_signed_v<char>",
        "is_unsigned_v<ulong>",
        "is_same<conditional_t<true, int, float>, int>::value",
        "is_convertible_v<bfloat, float>",
        "is_scalar_v<int>",
        "!is_convertible_v<float, bfloat>",
        "is_convertible_v<bfloat, half> && is_convertible_v<bfloat, uint>",
        "is_pointer_v<device int*>",
        "is_same_v<remove_cv_t<const volatile int>, int>",
        "is_same_v<remove_addrspace_t<const device int>, const int>",
        "_disjunction<is_same<int, uint>, is_same<int, int>>::value",
        "is_void_v<void>",
        "is_array_v<int[3]>",
        "is_same_v<enable_if_t<true, int>, int>",
        "is_same_v<make_unsigned_t<int>, uint>",
        "is_enum_v<mem_flags>",
        "is_class_v<float4>",
        "bool_constant<true>::value",
        "is_trivially_copyable_v<float4>",
        "is_arithmetic_v<bfloat>",
        "is_same_v<remove_reference_t<device float&>, device float>",
    ]
    source = "".join(f'static_assert({a} == {b}, "{a}");\n' for a, b in limits.items())
    source += "".join(f'static_assert({e}, "{e}");\n' for e in traits)
    source += "void f() { float x = 1; const float y = 2; static_assert(is_same_v<decltype(x), float>);"
    source += " static_assert(is_same_v<decltype(y), const float>); decltype(x) z = x;"
    source += " thread float& r = z; r = y; }\n"
    build(source)


# --------------------------------------------------------------------------------------- atomics, collectives


def test_atomics(build: Build) -> None:
    r = "memory_order_relaxed"
    unit = build(
        "template <class T, class P> void all(P p, device long* out) {\n"
        f"  *out++ = atomic_fetch_add_explicit(p, 5, {r}); *out++ = atomic_fetch_sub_explicit(p, 2, {r});\n"
        f"  *out++ = atomic_fetch_or_explicit(p, 8, {r}); *out++ = atomic_fetch_and_explicit(p, 12, {r});\n"
        f"  *out++ = atomic_fetch_xor_explicit(p, 5, memory_order_seq_cst);"
        f" *out++ = atomic_fetch_max_explicit(p, 100, {r});\n"
        f"  *out++ = atomic_fetch_min_explicit(p, 7, {r}); *out++ = atomic_exchange_explicit(p, 42, {r});\n"
        f"  T e = 1; *out++ = atomic_compare_exchange_weak_explicit(p, &e, T(2), {r}, {r}); *out++ = e;\n"
        f"  *out++ = atomic_compare_exchange_weak_explicit(p, &e, T(2), {r}, {r});"
        f" *out++ = atomic_load_explicit(p, {r});\n"
        f"  atomic_store_explicit(p, 77, {r}); }}\n"
        + "".join(
            f'extern "C" void f_{t}(device atomic<{t}>* p, device long* out) {{ all<{t}>(p, out); }}\n'
            f'extern "C" void g_{t}(threadgroup atomic_{t}* p, device long* out) {{ all<{t}>(p, out); }}\n'
            for t in ("int", "uint", "ulong")
        )
        + 'extern "C" void f_float(device atomic_float* p, device float* out) {\n'
        f"  out[0] = atomic_fetch_add_explicit(p, 1.5f, {r});"
        f" out[1] = atomic_fetch_sub_explicit(p, 0.5f, {r});\n"
        f"  out[2] = atomic_exchange_explicit(p, 9, {r}); float e = 9;\n"
        f"  out[3] = atomic_compare_exchange_weak_explicit(p, &e, 3.0f, {r}, {r});"
        f" out[4] = atomic_load_explicit(p, {r});\n"
        f"  atomic_store_explicit(p, NAN, {r}); e = NAN;\n"
        f"  out[5] = atomic_compare_exchange_weak_explicit(p, &e, 1.0f, {r}, {r}); }}\n"
        'extern "C" void f_bool(volatile device atomic_bool* p, device int* out) {\n'
        f"  out[0] = atomic_exchange_explicit(p, true, {r}); out[1] = atomic_load_explicit(p, {r});"
        f" bool e = false;\n"
        f"  out[2] = atomic_compare_exchange_weak_explicit(p, &e, true, {r}, {r}); out[3] = e;\n"
        "  atomic_thread_fence(mem_flags::mem_device | mem_flags::mem_threadgroup, memory_order_seq_cst); }\n"
        'extern "C" void f_max(device atomic_ulong* p) {'
        " atomic_max_explicit(p, 1ul << 40, memory_order_relaxed); }\n"
    )
    want = [1, 6, 4, 12, 12, 9, 100, 7, 0, 42, 1, 2]
    for t, dtype in (("int", np.int32), ("uint", np.uint32), ("ulong", np.uint64)):
        for f in "fg":
            p, out = np.array([1], dtype), np.zeros(12, np.int64)
            getattr(unit, f"{f}_{t}")(p, out)
            assert (list(out), p[0]) == (want, 77)
    p, out = np.array([1], np.float32), np.zeros(6, np.float32)
    unit.f_float(p, out)
    assert list(out) == [1, 2.5, 2, 1, 3, 1] and p[0] == 1, "a compare-exchange compares bits"
    b, flags = np.array([0], np.uint8), np.zeros(4, np.int32)
    unit.f_bool(b, flags)
    assert list(flags) == [0, 1, 0, 1]
    big = np.array([5], np.uint64)
    unit.f_max(big)
    assert big[0] == 1 << 40


LANES = np.arange(32)


def lanes_unit(bodies: dict[str, tuple[str, str]]) -> str:
    """Functions f(in, out, meetings)"
    " that run a body for 32 lanes, with `lane`, `in` and `out` at hand (lanes.h)."""
    source = '#include "lanes.h"\n'
    for name, (signature, body) in bodies.items():
        source += (
            f"static void body_{name}({signature}, uint lane) {{ {body} }}\n"
            f'extern "C" void {name}({signature}, long meetings) {{\n'
            "  for (run_ = 0; run_ <= uint(meetings); run_++)\n"
            f"    for (lane_ = 0; lane_ < 32; lane_++) {{ meeting_ = 0; body_{name}(in, out, lane_); }}\n}}\n"
        )
    return source


GROUPS = {"simd": 32, "quad": 4}
# Which lane of its group a lane's value comes from, for the lanes i and the group size s.
MOVES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "shuffle(x, (lane * 5 + 3) % SIZE)": lambda i, s: (i * 5 + 3) % s,
    "broadcast(x, 2)": lambda i, s: 2 + 0 * i,
    "broadcast_first(x)": lambda i, s: 0 * i,
    "shuffle_xor(x, 3)": lambda i, s: i % s ^ 3,
    "shuffle_up(x, 2)": lambda i, s: np.where(i % s >= 2, i % s - 2, i % s),
    "shuffle_down(x, 2)": lambda i, s: np.where(i % s + 2 < s, i % s + 2, i % s),
    "shuffle_rotate_up(x, 1)": lambda i, s: (i - 1) % s,
    "shuffle_rotate_down(x, 3)": lambda i, s: (i + 3) % s,
}


def reductions(rows: np.ndarray) -> dict[str, np.ndarray]:
    """What every function of a group gives its lanes; a row is a group, in wide arithmetic."""
    first = rows[:, :1]
    whole = {
        "sum": rows.sum(1),
        "product": rows.prod(1),
        "min": rows.min(1),
        "max": rows.max(1),
    }
    if rows.dtype.kind == "i":
        whole |= {f: getattr(np, f"bitwise_{f}").reduce(rows, axis=1) for f in ("and", "or", "xor")}
    result = {f: np.repeat(v[:, None], rows.shape[1], 1) for f, v in whole.items()}
    sums, products = np.cumsum(rows, 1), np.cumprod(rows, 1)
    result |= {"prefix_inclusive_sum": sums, "prefix_inclusive_product": products}
    result["prefix_exclusive_sum"] = np.concatenate([np.zeros_like(first), sums[:, :-1]], 1)
    result["prefix_exclusive_product"] = np.concatenate([np.ones_like(first), products[:, :-1]], 1)
    return result


def test_simd_and_quad_moves_and_reductions(build: Build, rng: np.random.Generator) -> None:
    integers = {t: INTEGERS[t] for t in ("char", "ushort", "int", "uint", "long", "ulong")}
    types = {"float": np.float32, "half": np.float16, "bfloat": np.uint16, "bool": np.bool_, **integers}
    cases = [(t, g) for t in types for g in GROUPS if g == "simd" or t in ("float", "half", "int", "ulong")]
    bodies: dict[str, tuple[str, str]] = {}
    for t, g in cases:
        signature = f"device const {t}* in, device {t}* out"
        for k, move in enumerate(MOVES):
            call = f"{g}_{move}".replace("SIZE", str(GROUPS[g]))
            bodies[f"{g}_{k}_{t}"] = (signature, f"{t} x = in[lane]; out[lane] = {call};")
        names = [] if t == "bool" else reductions(np.zeros((1, 4), "i8" if t in INTEGERS else "f8"))
        for f in names:
            bodies[f"{g}_{f}_{t}"] = (signature, f"out[lane] = {g}_{f}(in[lane]);")
    unit = build(lanes_unit(bodies), "-O0")
    for t, g in cases:
        dtype, size = types[t], GROUPS[g]
        values = rng.integers(0 if t[0] == "u" or t == "bool" else -2, 3, 32)
        x = bfloat_bits(values.astype(np.float32)) if t == "bfloat" else values.astype(dtype)
        for k, (move, source_lane) in enumerate(MOVES.items()):
            want = x[LANES - LANES % size + source_lane(LANES, size)]
            np.testing.assert_array_equal(run_lanes(unit, f"{g}_{k}_{t}", x), want, f"{g}_{move} of {t}")
        if t == "bool":
            continue
        rows = values.reshape(-1, size).astype(np.int64 if t in INTEGERS else np.float64)
        for f, wide in reductions(rows).items():
            flat = wide.ravel()
            with np.errstate(over="ignore"):
                want = bfloat_bits(flat.astype(np.float32)) if t == "bfloat" else flat.astype(dtype)
            np.testing.assert_array_equal(run_lanes(unit, f"{g}_{f}_{t}", x), want, f"{g}_{f} of {t}")


def run_lanes(unit: Unit, name: str, x: np.ndarray, rows: int = 1) -> np.ndarray:
    """What a function of lanes_unit with at most 30 meetings gives: `rows` values per lane."""
    out = np.zeros((rows, *x.shape) if rows > 1 else x.shape, x.dtype)
    getattr(unit, name)(x, out, 30)
    return out


def test_simd_functions_of_vectors_and_with_filling(build: Build, rng: np.random.Generator) -> None:
    fill = "simd_shuffle_and_fill"
    bodies = {
        "vectors": (
            "device const float4* in, device float4* out",
            "out[lane] = simd_sum(in[lane]); out[32 + lane] = quad_shuffle_xor(in[lane], 1);",
        ),
        "fills": (
            "device const float* in, device float* out",
            f"float x = in[lane], y = 100 + x; out[lane] = {fill}_up(x, y, 3);"
            f" out[32 + lane] = {fill}_down(x, y, 3); out[64 + lane] = {fill}_up(x, y, 3, 8);"
            f" out[96 + lane] = {fill}_down(x, y, 3, 8); out[128 + lane] = quad_shuffle_and_fill_up(x, y, 1);"
            " out[160 + lane] = quad_shuffle_and_fill_down(x, y, 1);",
        ),
    }
    unit = build(lanes_unit(bodies))
    v = rng.integers(-9, 9, (32, 4)).astype(np.float32)
    got = run_lanes(unit, "vectors", v, 2)
    np.testing.assert_array_equal(got, [np.tile(v.sum(0), (32, 1)), v[LANES ^ 1]])
    want = []
    for size, d in ((32, 3), (8, 3), (4, 1)):
        base, within = LANES - LANES % size, LANES % size
        want.append(np.where(within >= d, LANES - d, 100 + base + (within - d) % size))
        want.append(np.where(within + d < size, LANES + d, 100 + base + (within + d) % size))
    np.testing.assert_array_equal(run_lanes(unit, "fills", LANES.astype(np.float32), 6), want)


def test_votes(build: Build, rng: np.random.Generator) -> None:
    body = (
        "bool x = in[lane] != 0; out[lane] = ulong(simd_ballot(x)); out[32 + lane] = ulong(quad_ballot(x));"
        " out[64 + lane] = simd_all(x) + 2 * simd_any(x) + 4 * simd_is_first() + 8 * quad_all(x);"
        " out[64 + lane] += 16 * quad_any(x) + 32 * quad_is_first();"
        " out[96 + lane] = ulong(simd_active_threads_mask()) + simd_ballot(x).any() + simd_ballot(x).all();"
    )
    unit = build(lanes_unit({"votes": ("device const ulong* in, device ulong* out", body)}))
    votes = rng.integers(0, 2, 32).astype(np.uint64)
    votes[4:12] = 1
    votes[0] = 0
    quads = votes.reshape(8, 4)
    masks, quad_masks, flags, active = run_lanes(unit, "votes", votes, 4)
    assert set(masks) == {sum(1 << int(i) for i in LANES if votes[i])}
    np.testing.assert_array_equal(quad_masks, np.repeat(quads @ np.array([1, 2, 4, 8], np.uint64), 4))
    want = 2 + 4 * (LANES == 0) + np.repeat(8 * quads.all(1) + 16 * quads.any(1), 4) + 32 * (LANES % 4 == 0)
    np.testing.assert_array_equal(flags, want)
    assert set(active) == {0xFFFFFFFF + 1}


@pytest.mark.parametrize("t", ["float", "half", "bfloat"])
def test_simdgroup_matrix(t: str, build: Build, rng: np.random.Generator) -> None:
    """Load, multiply, accumulate, store against NumPy, and the place of each lane's elements."""
    body = (
        f"simdgroup_matrix<{t}, 8, 8> a, b, d; simdgroup_load(a, in, 10);"
        f" simdgroup_load(b, in, 10, ulong2(1, 8), true);\n"
        f"auto c = make_filled_simdgroup_matrix<{t}, 8, 8>({t}(3));"
        f" simdgroup_multiply_accumulate(d, a, b, c);\n"
        f"simdgroup_store(d, out, 8); simdgroup_multiply(d, a, b);"
        f" simdgroup_store(d, out + 64, 8, 0, true);\n"
        f"simdgroup_store(simdgroup_matrix<{t}, 8, 8>({t}(2)), out + 128);\n"
        f"simdgroup_matrix<float, 8, 8> f; simdgroup_multiply(f, a, a); simdgroup_store(a * a, out + 192);\n"
        f"out[256 + 2 * lane] = a.thread_elements()[0]; out[257 + 2 * lane] = a.thread_elements().y;"
    )
    unit = build(lanes_unit({"f": (f"device const {t}* in, device {t}* out", body)}))
    memory = rng.integers(-3, 4, (17, 10)).astype(np.float32)
    forms: dict[str, np.ndarray] = {
        "float": memory,
        "half": memory.astype(np.float16),
        "bfloat": bfloat_bits(memory),
    }
    raw = forms[t]
    out = np.zeros(320, raw.dtype)
    unit.f(np.ascontiguousarray(raw), out, 120)
    values = (bfloat_values(out) if t == "bfloat" else out).astype(np.float32)
    a, b = memory[:8, :8], memory[8:16, 1:9].T

    def rounded(x: np.ndarray) -> np.ndarray:
        return bfloat_values(bfloat_bits(x)) if t == "bfloat" else x

    np.testing.assert_array_equal(values[:64].reshape(8, 8), rounded(a @ b + 3))
    np.testing.assert_array_equal(values[64:128].reshape(8, 8), rounded(a @ b).T)
    np.testing.assert_array_equal(values[128:192].reshape(8, 8), 2 * np.eye(8))
    np.testing.assert_array_equal(values[192:256].reshape(8, 8), rounded(a @ a))
    quad = LANES // 4
    row, column = (quad & 4) + LANES // 2 % 4, (quad & 2) * 2 + LANES % 2 * 2
    np.testing.assert_array_equal(
        values[256:].reshape(32, 2), np.stack([a[row, column], a[row, column + 1]], 1)
    )


# ---------------------------------------------------------------------------------------- the headers as such


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("bfloat b = 1.0f;", "no viable conversion from 'float'"),
        ("bfloat b = c ? bf : -INFINITY;", "no viable conversion from 'float'"),
        ("bfloat b = bf * 1.5f;", "no viable conversion from 'float'"),
        ("bfloat b = 1.0h;", "no viable conversion from 'half'"),
        ("bf = f;", "no viable overloaded '='"),
        ("float4 v = int4(1);", "no viable conversion"),
        ("float4 v = f4 + int4(1);", "invalid operands"),
        ("float4 v = f4 * half4(1);", "invalid operands"),
        ("float4 v = f4.xyz;", "no viable conversion"),
        ("float3 v = f4;", "no viable conversion"),
        ("f4.xx = float2(1);", "put_xx"),
        ("float2 v = f4.xyzz;", "no viable conversion"),
        ("float x = float2(1).z;", "no member named 'z'"),
        ("int4 v = int4(1) & f4;", "invalid operands"),
        ("float4 v = f4 & f4;", "takes vectors of integers"),
        (
            "atomic_fetch_add_explicit(tf, 1.0f, memory_order_relaxed);",
            "no float atomics in threadgroup memory",
        ),
        ("atomic_store_explicit(tf, 1.0f, memory_order_relaxed);", "no float atomics in threadgroup memory"),
        ("atomic_fetch_or_explicit(df, 1, memory_order_relaxed);", "not for atomics of this type"),
        (
            "atomic_fetch_add_explicit((thread atomic_int*)0, 1, memory_order_relaxed);",
            "no matching function",
        ),
        ("atomic<short> s;", "no atomic of this type"),
        ("simdgroup_matrix<float, 4, 4> m;", "8 by 8"),
        ("simdgroup_matrix<int, 8, 8> m;", "half, bfloat or float"),
        ("device float* p = &f;", "cannot initialize"),
        ("threadgroup float* p = d;", "cannot initialize"),
        ("device float* p = k;", "cannot initialize"),
        ("k[0] = 1;", "read-only"),
        ("uint u = as_type<uint>(1.0h);", "same size"),
        ("float x = dot(f, f);", "no matching function"),
        ("float3 v = cross(f4, f4);", "no matching function"),
        ("int i = popcount(f);", "no matching function"),
    ],
)
def test_what_metal_refuses_is_refused(body: str, message: str, pch: Path) -> None:
    declared = "bfloat bf; float f = 0; float4 f4; bool c = true;"
    arguments = "device float* d, constant float* k, threadgroup atomic_float* tf, device atomic_float* df"
    source = f"using namespace metal; void f({arguments}) {{ {declared} {body} }}"
    result = clang(source, "-include-pch", str(pch), "-fsyntax-only")
    assert result.returncode != 0, "it compiled"
    assert message in result.stderr, result.stderr


PARTS = [*sorted(p.name for p in INCLUDE.glob("metal_*")), "simd/simd.h"]


@pytest.mark.parametrize("part", PARTS)
def test_header_stands_alone_and_comes_twice(part: str, pch: Path) -> None:
    source = f"#include <{part}>\n#include <{part}>\nnamespace metal {{}} using namespace metal;\n"
    source += "int local, global, generic, pipe, read_only;\n"
    result = clang(source, "-fsyntax-only", "-Wall", "-Wno-unused-variable")
    assert (result.returncode, result.stderr) == (0, "")
    result = clang(source, "-include-pch", str(pch), "-fsyntax-only")
    assert (result.returncode, result.stderr) == (0, "")


def test_headers_are_empty_while_preprocessing() -> None:
    source = "".join(f"#include <{part}>\n" for part in PARTS)
    result = clang(source, "-E", "-P", "-DMSL_PREPROCESSING")
    assert result.stdout.strip() == ""


def test_headers_compile_for_a_gpu() -> None:
    features = "+__opencl_c_program_scope_global_variables,+__opencl_c_generic_address_space"
    target = ["-target", "nvptx64-nvidia-cuda", "-march=sm_90", "-Xclang", f"-cl-ext={features}"]
    kernel = loop("f", "half4", {"x": "half4"}, "exp(x) * simd_sum(x) + sin(x.wzyx)")
    result = clang(f"#include <metal_stdlib>\nusing namespace metal;\n{kernel}", *target, "-S", "-o", "-")
    assert result.returncode == 0 and ".func f(" in result.stdout, result.stderr
    assert set(re.findall(r"\.extern \.func.*?(\w+)\s*$", result.stdout, re.M)) == {"__msl_simd_sum_f32"}


def test_functions_need_no_library(pch: Path) -> None:
    """Whatever a kernel calls is inline: beside LLVM's intrinsics, nothing is left to be linked."""
    source = "using namespace metal;\n"
    for t in ("float", "half4", "bfloat"):
        source += "".join(loop(f"f_{f}_{t}", t, {"x": t}, f"{f}(x)") for f in UNARY)
        source += "".join(loop(f"f_{f}_{t}", t, {"x": t, "y": t}, f"{f}(x, y)") for f in BINARY)
    result = clang(source, "-include-pch", str(pch), "-S", "-emit-llvm", "-o", "-")
    declared = re.findall(r"^declare .*@([\w.]+)\(", result.stdout, re.M)
    assert declared and [name for name in declared if not name.startswith("llvm.")] == []
    assert "llvm.fmuladd" not in result.stdout, "what contraction does differs from target to target"


def test_fast_math_reaches_the_kernel_but_not_the_elementary_functions() -> None:
    source = '#include <metal_stdlib>\nextern "C" float own(float a, float b) { return a * b + a; }\n'
    source += 'extern "C" float sum(float x) { return msl_impl::pow(x, 3); }\n'
    result = clang(source, *compiler.MATH["fast"], "-S", "-emit-llvm", "-o", "-")
    own, library = re.findall(r"^define .*?^}", result.stdout, re.M | re.S)
    fast = re.compile(r"f(add|sub|mul|div) reassoc")
    assert fast.search(own) and not fast.search(library)
