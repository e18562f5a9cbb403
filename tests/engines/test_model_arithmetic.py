"""The model's arithmetic, operation by operation, against NumPy and exact fractions."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest

from lab import ir
from lab.engines.model import Launch, Unmodelled, run

WORD = 0xFFFFFFFF

NUMPY = {
    "i8": np.uint8,
    "i16": np.uint16,
    "i32": np.uint32,
    "i64": np.uint64,
    "half": np.float16,
    "float": np.float32,
    "double": np.float64,
    "bfloat": np.uint16,
}


def computed(kinds: list[str], result: str, body: str, *arrays: np.ndarray) -> np.ndarray:
    """``%r`` of ``body``, per element of ``arrays``, which are ``%a``, ``%b``... of types ``kinds``."""
    loads = [
        f"""
        %p{n} = getelementptr i8, ptr %launch, i64 {8 * n}
        %q{n} = load ptr, ptr %p{n}
        %s{n} = getelementptr {kind}, ptr %q{n}, i32 %index
        %{name} = load {kind}, ptr %s{n}, align 1"""
        for n, (kind, name) in enumerate(zip(kinds, "abc", strict=False))
    ]
    end = f"""
        %p = getelementptr i8, ptr %launch, i64 {8 * len(kinds)}
        %q = load ptr, ptr %p
        %s = getelementptr {result}, ptr %q, i32 %index
        store {result} %r, ptr %s, align 1
        ret void"""
    head = """
        define void @msl_thread(ptr %g, i32 %tid) {
        %launch = load ptr, ptr %g
        %at = getelementptr i8, ptr %g, i64 16
        %group = load i32, ptr %at
        %start = mul i32 %group, 256
        %index = add i32 %start, %tid"""
    module = ir.parse(f"{head}{''.join(loads)}\n{body}\n{end}\n}}")
    out = bytearray(len(arrays[0]) * NUMPY[result]().itemsize)
    buffers = {n: bytearray(a.tobytes()) for n, a in enumerate(arrays)} | {len(kinds): out}
    outcome = run(module, Launch(buffers, (len(arrays[0]), 1, 1), (256, 1, 1)))
    assert not outcome.reports
    return np.frombuffer(out, NUMPY[result])


def integers(rng: np.random.Generator, kind: str, count: int = 600) -> np.ndarray:
    bits = int(kind[1:])
    values = rng.integers(1 << 64, size=count, dtype=np.uint64).astype(NUMPY[kind])
    edges = [0, 1, 2, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    values[: 2 * len(edges)] = rng.permutation(np.array(edges * 2, dtype=np.uint64)).astype(NUMPY[kind])
    return values


def floats(rng: np.random.Generator, kind: str, count: int = 600) -> np.ndarray:
    """Every kind of value: random patterns, numbers near each other, zeros, subnormals, infinities, NaN."""
    form = NUMPY[kind]
    patterns = rng.integers(1 << 64, size=count, dtype=np.uint64).astype(f"u{form().itemsize}").view(form)
    patterns[np.isnan(patterns)] = np.nan  # quiet: what fmin and fmax make of signalling ones is open
    patterns[: count // 2] = rng.standard_normal(count // 2).astype(form)
    info = np.finfo(form)
    edges = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        np.inf,
        -np.inf,
        np.nan,
        info.max,
        info.tiny,
        info.smallest_subnormal,
        0.5,
        2.5,
    ]
    patterns[: 4 * len(edges)] = rng.permutation(np.array(edges * 4)).astype(form)
    return patterns


def signed(x: np.ndarray) -> np.ndarray:
    return x.view(x.dtype.str.replace("u", "i"))


@pytest.mark.parametrize("kind", ["i8", "i16", "i32", "i64"])
def test_integer_arithmetic_is_numpys(kind, rng):
    a, b = integers(rng, kind), integers(rng, kind)
    bits = int(kind[1:])
    amount = b % bits
    divisor = np.where(b == 0, 7, b).astype(b.dtype)
    safe = np.where((a == 1 << (bits - 1)) & (divisor == (1 << bits) - 1), 3, divisor).astype(b.dtype)
    # NumPy's own division rounds down; LLVM's goes toward zero.
    pairs = [(int(x), int(y)) for x, y in zip(signed(a), signed(safe), strict=True)]
    quotient = np.array([math.trunc(Fraction(x, y)) for x, y in pairs])
    rest = np.array([x - y * math.trunc(Fraction(x, y)) for x, y in pairs])
    for operation, right, expected in [
        ("add", b, a + b),
        ("sub", b, a - b),
        ("mul", b, a * b),
        ("and", b, a & b),
        ("or", b, a | b),
        ("xor", b, a ^ b),
        ("shl", amount, a << amount),
        ("lshr", amount, a >> amount),
        ("ashr", amount, signed(a) >> signed(amount)),
        ("udiv", divisor, a // divisor),
        ("urem", divisor, a % divisor),
        ("sdiv", safe, quotient),
        ("srem", safe, rest),
    ]:
        got = computed([kind, kind], kind, f"%r = {operation} {kind} %a, %b", a, right)
        assert (got == np.asarray(expected).astype(got.dtype)).all(), operation


@pytest.mark.parametrize("kind", ["i8", "i32", "i64"])
def test_integer_comparisons_are_numpys(kind, rng):
    a, b = integers(rng, kind), integers(rng, kind)
    b[::3] = a[::3]
    for name, compare in {"eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
                          "lt": np.less, "le": np.less_equal}.items():  # fmt: skip
        for prefix, x, y in (
            [("", a, b)] if name in ("eq", "ne") else [("u", a, b), ("s", signed(a), signed(b))]
        ):
            body = f"%c = icmp {prefix}{name} {kind} %a, %b\n%r = zext i1 %c to i8"
            assert (computed([kind, kind], "i8", body, a, b) == compare(x, y)).all(), prefix + name


def same(got: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit, but any NaN for a NaN."""
    bits = f"u{got.dtype.itemsize}"
    expected = expected.astype(got.dtype)
    equal = (got.view(bits) == expected.view(bits)) | (np.isnan(got) & np.isnan(expected))
    assert equal.all(), list(zip(got[~equal], expected[~equal], strict=True))[:5]


@pytest.mark.parametrize("kind", ["half", "float", "double"])
def test_float_arithmetic_is_ieee(kind, rng):
    a, b = floats(rng, kind), floats(rng, kind)
    with np.errstate(all="ignore"):
        for operation, expected in [
            ("fadd", a + b),
            ("fsub", a - b),
            ("fmul", a * b),
            ("fdiv", a / b),
            ("frem", np.fmod(a, b)),
        ]:
            same(computed([kind, kind], kind, f"%r = {operation} {kind} %a, %b", a, b), expected)
        root = f"%r = call {kind} @llvm.sqrt.x({kind} %a)"
        same(computed([kind], kind, root, a), np.sqrt(a))
        same(computed([kind], kind, f"%r = fneg {kind} %a", a), -a)
        for name, function in {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint,
                               "nearbyint": np.rint, "roundeven": np.rint,
                               "fabs": np.abs}.items():  # fmt: skip
            same(computed([kind], kind, f"%r = call {kind} @llvm.{name}.x({kind} %a)", a), function(a))
        nearest = np.array([half_away(float(v)) for v in a], a.dtype)
        same(computed([kind], kind, f"%r = call {kind} @llvm.round.x({kind} %a)", a), nearest)
        for name, function in {"copysign": np.copysign, "minnum": np.fmin, "maxnum": np.fmax,
                               "minimum": np.minimum, "maximum": np.maximum}.items():  # fmt: skip
            body = f"%r = call {kind} @llvm.{name}.x({kind} %a, {kind} %b)"
            apart = (a != 0) | (b != 0)  # which zero is the smaller is not for NumPy to say
            same(computed([kind, kind], kind, body, a, b)[apart], function(a, b)[apart])


def half_away(x: float) -> float:
    """To the nearest whole number, halves away from zero."""
    if not math.isfinite(x):
        return x
    return math.copysign(math.floor(abs(Fraction(x)) + Fraction(1, 2)), x)


def test_zeros_are_ordered_by_sign_in_minimum_and_maximum():
    a, b = np.float32([0.0, -0.0, 0.0, -0.0]), np.float32([-0.0, 0.0, 0.0, -0.0])
    for name, expected in [("minimum", [-0.0, -0.0, 0.0, -0.0]), ("maximum", [0.0, 0.0, 0.0, -0.0])]:
        body = f"%r = call float @llvm.{name}.f32(float %a, float %b)"
        same(computed(["float", "float"], "float", body, a, b), np.float32(expected))


def as_bfloat(x: np.ndarray) -> np.ndarray:
    """Doubles to the patterns of the nearest bfloats, ties to even."""
    return np.array([bfloat_bits(float(value)) for value in x], np.uint16)


def bfloat_bits(value: float) -> int:
    if math.isnan(value):
        return 0x7FC0
    sign = 0x8000 * (math.copysign(1.0, value) < 0)
    if abs(value) >= 2.0**128 - 2.0**119:  # halfway from the largest to the next power of two
        return sign | 0x7F80
    with np.errstate(over="ignore"):
        near = int(np.float32(abs(value)).view(np.uint32)) >> 16
    choices = [bits for bits in (near - 1, near, near + 1) if 0 <= bits < 0x7F80]
    exact = Fraction(abs(value))
    return sign | min(choices, key=lambda bits: (abs(Fraction(from_bfloat(bits)) - exact), bits & 1))


def from_bfloat(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", int(bits) << 16))[0])


def test_bfloat_arithmetic_rounds_once(rng):
    a, b = (rng.integers(1 << 16, size=600, dtype=np.uint16) for _ in range(2))
    a[:300], b[:300] = (as_bfloat(rng.standard_normal(300)) for _ in range(2))
    x, y = (np.array([from_bfloat(v) for v in values]) for values in (a, b))
    with np.errstate(all="ignore"):
        for operation, exact in [("fadd", x + y), ("fsub", x - y), ("fmul", x * y), ("fdiv", x / y)]:
            got = computed(["bfloat", "bfloat"], "bfloat", f"%r = {operation} bfloat %a, %b", a, b)
            assert got.tolist() == as_bfloat(exact).tolist(), operation
        single = rng.standard_normal(600).astype(np.float32)
        got = computed(["float"], "bfloat", "%r = fptrunc float %a to bfloat", single)
        assert got.tolist() == as_bfloat(single).tolist()
        same(computed(["bfloat"], "float", "%r = fpext bfloat %a to float", a), x.astype(np.float32))


def rounded(exact: Fraction, form: type[np.floating]) -> np.floating:
    """An exact number to the nearest of a format, ties to even."""
    near = form(float(exact))
    if not np.isfinite(near):
        return near
    bits = f"u{near.dtype.itemsize}"
    choices = [near, np.nextafter(near, form(np.inf)), np.nextafter(near, form(-np.inf))]
    choices = [c for c in choices if np.isfinite(c)]
    return min(choices, key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(bits)) & 1))


@pytest.mark.parametrize("kind", ["half", "float", "double"])
def test_fma_rounds_once(kind, rng):
    form = NUMPY[kind]
    a, b = (rng.standard_normal(900).astype(form) for _ in range(2))
    with np.errstate(all="ignore"):
        c = (-(a.astype(np.float64) * b) * rng.choice([1, 1.0000001, 0.01, 64, 0], 900)).astype(form)
        # Ties of the sum, moved off the middle by a small product.
        a[:200] = form(1) + rng.integers(1, 9, 200).astype(form) * np.finfo(form).eps
        b[:200] = np.finfo(form).eps / 2
        c[:200] = (1 + rng.integers(0, 9, 200) * np.finfo(form).eps).astype(form) * rng.choice([1, -1], 200)
    got = computed(
        [kind] * 3, kind, f"%r = call {kind} @llvm.fma.x({kind} %a, {kind} %b, {kind} %c)", a, b, c
    )
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)
    ]
    nonzero = np.array([e != 0 for e in exact])
    expected = np.array([rounded(e, form) for e in exact], form)
    same(got[nonzero], expected[nonzero])
    specials = np.array(
        [(np.inf, 0, 1), (np.inf, 1, -np.inf), (1, 2, np.inf), (0, -1, 0), (-0.0, 1, -0.0)], form
    )
    got = computed(
        [kind] * 3, kind, f"%r = call {kind} @llvm.fma.x({kind} %a, {kind} %b, {kind} %c)", *specials.T.copy()
    )
    same(got, np.array([np.nan, np.nan, np.inf, 0.0, -0.0], form))


@pytest.mark.parametrize("kind", ["half", "float"])
def test_float_comparisons_know_what_is_unordered(kind, rng):
    a, b = floats(rng, kind), floats(rng, kind)
    b[::4] = a[::4]
    unordered = np.isnan(a) | np.isnan(b)
    tests = {"eq": a == b, "gt": a > b, "ge": a >= b, "lt": a < b, "le": a <= b, "ne": (a != b) & ~unordered}
    tests = {f"o{n}": t for n, t in tests.items()} | {f"u{n}": t | unordered for n, t in tests.items()}
    tests |= {"ord": ~unordered, "uno": unordered, "true": unordered | True, "false": unordered & False}
    for name, expected in tests.items():
        body = f"%c = fcmp {name} {kind} %a, %b\n%r = zext i1 %c to i8"
        assert (computed([kind, kind], "i8", body, a, b) == expected).all(), name


def test_casts_between_floats_and_integers_are_numpys(rng):
    with np.errstate(all="ignore"):
        for source, target in [("float", "half"), ("double", "half"), ("double", "float"), ("half", "float")]:
            x = floats(rng, source)
            operation = "fpext" if source == "half" else "fptrunc"
            same(
                computed([source], target, f"%r = {operation} {source} %a to {target}", x),
                x.astype(NUMPY[target]),
            )
        whole = integers(rng, "i64", 2000)
        whole[100:] >>= rng.integers(64, size=1900).astype(np.uint64)
        for target in ("float", "double"):
            same(
                computed(["i64"], target, f"%r = uitofp i64 %a to {target}", whole),
                whole.astype(NUMPY[target]),
            )
            got = computed(["i64"], target, f"%r = sitofp i64 %a to {target}", whole)
            same(got, signed(whole).astype(NUMPY[target]))
        small = integers(rng, "i32")
        exact = np.array([rounded(Fraction(int(v)), np.float16) for v in small])
        same(computed(["i32"], "half", "%r = uitofp i32 %a to half", small), exact)
        x = rng.uniform(-2e9, 2e9, 500).astype(np.float32)
        got = computed(["float"], "i32", "%r = fptosi float %a to i32", x)
        assert (signed(got) == x.astype(np.int32)).all()
        got = computed(["float"], "i32", "%r = fptoui float %a to i32", np.abs(x))
        assert (got == np.abs(x).astype(np.uint32)).all()


def test_saturating_casts_clamp_and_send_nan_to_zero():
    x = np.float32([1.9, -1.9, 1e20, -1e20, np.nan, np.inf, -np.inf, 2147483648.0])
    got = computed(["float"], "i32", "%r = call i32 @llvm.fptosi.sat.i32.f32(float %a)", x)
    most, least = (1 << 31) - 1, -(1 << 31)
    assert signed(got).tolist() == [1, -1, most, least, 0, most, least, most]
    got = computed(["float"], "i8", "%r = call i8 @llvm.fptoui.sat.i8.f32(float %a)", x)
    assert got.tolist() == [1, 0, 255, 0, 0, 255, 0, 255]


def test_integer_casts_extend_and_cut(rng):
    x = integers(rng, "i16")
    assert (computed(["i16"], "i32", "%r = zext i16 %a to i32", x) == x).all()
    assert (signed(computed(["i16"], "i64", "%r = sext i16 %a to i64", x)) == signed(x)).all()
    assert (computed(["i16"], "i8", "%r = trunc i16 %a to i8", x) == x.astype(np.uint8)).all()
    body = "%t = trunc i16 %a to i7\n%r = sext i7 %t to i8"
    assert (signed(computed(["i16"], "i8", body, x)) == ((x & 127).astype(int) ^ 64) - 64).all()


def test_bits_of_a_nan_survive_moves(rng):
    x = rng.integers(1 << 32, size=600, dtype=np.uint32)
    x[:300] |= 0x7F800000
    body = (
        "%f = bitcast i32 %a to float\n%m = alloca float\nstore float %f, ptr %m\n%n = load float, ptr %m\n"
    )
    body += "%s = select i1 true, float %n, float 0.0\n%t = fneg float %s\n%r = bitcast float %t to i32"
    assert (computed(["i32"], "i32", body, x) == x ^ 0x80000000).all()
    h = rng.integers(1 << 16, size=600, dtype=np.uint16)
    assert (computed(["half"], "half", "%r = freeze half %a", h.view(np.float16)).view(np.uint16) == h).all()


INTEGER_INTRINSICS = [
    ("smin", 2, lambda a, b: np.minimum(signed(a), signed(b))),
    ("smax", 2, lambda a, b: np.maximum(signed(a), signed(b))),
    ("umin", 2, np.minimum),
    ("umax", 2, np.maximum),
    ("uadd.sat", 2, lambda a, b: np.where(a + b < a, a.dtype.type(-1 & (1 << 8 * a.itemsize) - 1), a + b)),
    ("usub.sat", 2, lambda a, b: np.where(a < b, 0, a - b)),
    ("ctpop", 1, np.bitwise_count),
    ("abs:i1 false", 1, lambda a: np.abs(signed(a))),
    ("bswap", 1, lambda a: a.byteswap()),
]


@pytest.mark.parametrize("kind", ["i16", "i32", "i64"])
def test_integer_intrinsics_are_numpys(kind, rng):
    a, b = integers(rng, kind), integers(rng, kind)
    for name, arity, function in INTEGER_INTRINSICS:
        base, _, more = name.partition(":")
        arguments = ", ".join([f"{kind} %{n}" for n in "ab"[:arity]] + ([more] if more else []))
        body = f"%r = call {kind} @llvm.{base}.{kind}({arguments})"
        got = computed([kind] * arity, kind, body, *(a, b)[:arity])
        with np.errstate(all="ignore"):
            expected = np.asarray(function(*(a, b)[:arity])).astype(a.dtype)
        assert (got == expected).all(), name


def test_bits_are_counted_turned_and_funnelled(rng):
    a, b = integers(rng, "i32"), integers(rng, "i32")
    n = integers(rng, "i32")

    def got(call: str) -> list[int]:
        return computed(["i32"] * 3, "i32", f"%r = call i32 @llvm.{call}", a, b, n).tolist()

    texts = [f"{v:032b}" for v in a]
    assert got("ctlz.i32(i32 %a, i1 false)") == [len(t) - len(t.lstrip("0")) for t in texts]
    assert got("cttz.i32(i32 %a, i1 false)") == [len(t) - len(t.rstrip("0")) for t in texts]
    assert got("bitreverse.i32(i32 %a)") == [int(t[::-1], 2) for t in texts]
    pairs = [int(x) << 32 | int(y) for x, y in zip(a, b, strict=True)]
    left = [(p << (int(k) % 32) >> 32) & WORD for p, k in zip(pairs, n, strict=True)]
    right = [p >> (int(k) % 32) & WORD for p, k in zip(pairs, n, strict=True)]
    assert got("fshl.i32(i32 %a, i32 %b, i32 %c)") == left
    assert got("fshr.i32(i32 %a, i32 %b, i32 %c)") == right
    order = [(int(x) > int(y)) - (int(x) < int(y)) for x, y in zip(a, b, strict=True)]
    assert got("ucmp.i32.i32(i32 %a, i32 %b)") == [o & WORD for o in order]
    total = [int(x) + int(y) for x, y in zip(signed(a), signed(b), strict=True)]
    clamped = [min(max(t, -(1 << 31)), (1 << 31) - 1) & WORD for t in total]
    assert got("sadd.sat.i32(i32 %a, i32 %b)") == clamped
    for name, exact in [("sadd", total), ("umul", [int(x) * int(y) for x, y in zip(a, b, strict=True)])]:
        body = f"%x = call {{ i32, i1 }} @llvm.{name}.with.overflow.i32(i32 %a, i32 %b)\n"
        body += "%o = extractvalue { i32, i1 } %x, 1\n%r = zext i1 %o to i8"
        limits = range(-(1 << 31), 1 << 31) if name == "sadd" else range(1 << 32)
        assert computed(["i32", "i32"], "i8", body, a, b).tolist() == [e not in limits for e in exact]


def test_ldexp_and_frexp_scale_by_powers_of_two(rng):
    x = floats(rng, "float")
    n = rng.integers(-300, 300, 600).astype(np.uint32)
    with np.errstate(all="ignore"):
        expected = x.copy()
        for i in np.flatnonzero(np.isfinite(x) & (x != 0)):
            expected[i] = rounded(Fraction(float(x[i])) * Fraction(2) ** int(signed(n)[i]), np.float32)
    body = "%r = call float @llvm.ldexp.f32.i32(float %a, i32 %b)"
    got = computed(["float", "i32"], "float", body, x, n)
    signs = (got != 0) | (expected != 0)
    same(got[signs], expected[signs])
    finite = x[np.isfinite(x)]
    body = "%x = call { float, i32 } @llvm.frexp.f32.i32(float %a)\n%r = extractvalue { float, i32 } %x, "
    fraction, exponent = np.frexp(finite)
    same(computed(["float"], "float", body + "0", finite), fraction)
    assert (signed(computed(["float"], "i32", body + "1", finite)) == exponent).all()


def test_classes_of_floats_are_told_apart():
    x = np.array([0x7F800001, 0x7FC00000, 0xFF800000, 0xBF800000, 0x80000001, 0x80000000,
                  0x00000000, 0x00000001, 0x3F800000, 0x7F800000], np.uint32)  # fmt: skip
    for number in range(10):
        body = (
            f"%f = bitcast i32 %a to float\n%c = call i1 @llvm.is.fpclass.f32(float %f, i32 {1 << number})\n"
        )
        got = computed(["i32"], "i8", body + "%r = zext i1 %c to i8", x)
        assert got.tolist() == [int(i == number) for i in range(10)]


def test_vectors_compute_per_element(rng):
    a = rng.integers(1 << 32, size=300, dtype=np.uint32)
    body = """
    %v0 = insertelement <4 x i32> poison, i32 %a, i32 0
    %v1 = shufflevector <4 x i32> %v0, <4 x i32> poison, <4 x i32> zeroinitializer
    %v2 = add <4 x i32> %v1, <i32 0, i32 1, i32 2, i32 3>
    %v3 = call <4 x i32> @llvm.umax.v4i32(<4 x i32> %v2, <4 x i32> splat (i32 5))
    %c = icmp ugt <4 x i32> %v3, splat (i32 1000)
    %v4 = select <4 x i1> %c, <4 x i32> %v3, <4 x i32> %v2
    %bits = bitcast <4 x i1> %c to i4
    %wide = zext i4 %bits to i32
    %sum = call i32 @llvm.vector.reduce.add.v4i32(<4 x i32> %v4)
    %top = call i32 @llvm.vector.reduce.umax.v4i32(<4 x i32> %v4)
    %which = and i32 %a, 3
    %one = extractelement <4 x i32> %v4, i32 %which
    %x1 = xor i32 %sum, %top
    %x2 = xor i32 %x1, %one
    %r = xor i32 %x2, %wide
    """
    got = computed(["i32"], "i32", body, a)
    for value, x in zip(got.tolist(), a.tolist(), strict=True):
        v2 = [(x + i) & WORD for i in range(4)]
        v3 = [max(v, 5) for v in v2]
        c = [v > 1000 for v in v3]
        v4 = [p if t else q for p, q, t in zip(v3, v2, c, strict=True)]
        wide = sum(t << i for i, t in enumerate(c))
        assert value == (sum(v4) & WORD) ^ max(v4) ^ v4[x & 3] ^ wide


def test_vectors_of_floats_reduce_in_order(rng):
    a = rng.standard_normal(100).astype(np.float32)
    body = """
    %v0 = insertelement <3 x float> <float poison, float 1.5, float 1.0e8>, float %a, i64 0
    %s = call float @llvm.vector.reduce.fadd.v3f32(float -0.0, <3 x float> %v0)
    %m = call float @llvm.vector.reduce.fmax.v3f32(<3 x float> %v0)
    %d = fsub float %m, %s
    %e = fptrunc float %d to half
    %r = fpext half %e to float
    """
    expected = np.float32(1e8) - ((a + np.float32(1.5)) + np.float32(1e8))
    same(computed(["float"], "float", body, a), expected.astype(np.float16).astype(np.float32))


def test_vectors_in_memory_take_what_their_elements_need():
    body = """
    %m = alloca [2 x <3 x float>], align 16
    call void @llvm.memset.p0.i64(ptr %m, i8 -1, i64 32, i1 false)
    store <3 x float> <float 1.0, float 2.0, float 3.0>, ptr %m, align 16
    %t = getelementptr i8, ptr %m, i64 12
    %kept = load i32, ptr %t
    %n = getelementptr [2 x <3 x float>], ptr %m, i64 0, i64 1
    call void @llvm.memcpy.p0.p0.i64(ptr %n, ptr %m, i64 16, i1 false)
    %u = getelementptr i8, ptr %m, i64 24
    %third = load float, ptr %u
    %bits = alloca <9 x i1>
    store <9 x i1> <i1 1, i1 0, i1 0, i1 1, i1 0, i1 0, i1 0, i1 0, i1 1>, ptr %bits
    %word = load i16, ptr %bits
    %w = uitofp i16 %word to float
    %k = icmp eq i32 %kept, -1
    %f = fadd float %third, %w
    %r = select i1 %k, float %f, float 0.0
    """
    assert computed(["i32"], "float", body, np.zeros(1, np.uint32)).tolist() == [3.0 + 0b100001001]


def test_phis_change_places_all_at_once():
    body = """
      br label %loop
    loop:
      %i = phi i32 [ 0, %entry ], [ %i1, %loop ]
      %x = phi i32 [ %a, %entry ], [ %y, %loop ]
      %y = phi i32 [ 1, %entry ], [ %x, %loop ]
      %i1 = add i32 %i, 1
      %more = icmp ult i32 %i1, 4
      br i1 %more, label %loop, label %out
    out:
      %r = sub i32 %x, %y
    """
    got = computed(["i32"], "i32", f"br label %entry\nentry:{body}", np.array([10], np.uint32))
    assert got.tolist() == [(1 - 10) & WORD]


def test_an_unknown_intrinsic_is_named():
    with pytest.raises(Unmodelled, match=r"llvm\.exp\.f32"):
        computed(["float"], "float", "%r = call float @llvm.exp.f32(float %a)", np.ones(1, np.float32))
