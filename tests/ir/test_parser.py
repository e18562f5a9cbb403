from __future__ import annotations

import re
import struct

import llvmlite.binding
import numpy as np
import pytest

from lab import ir
from tests.ir.snippets import llvm

# One function with most of what a kernel can bring about.
SOURCE = """
struct V { float4 v; V operator+(V o) const { V r; r.v = v + o.v; return r; } };
struct Big { float a[10]; int n; char c; half h; long l; };
static const __global float tab[6] = {1.5f, 0.1f, -0.0f, 1e30f, 3.4028235e38f, 1e-40f};
static const __global char text[] = "he\\"l\\\\lo\\n";
static const __global half ht[3] = {1.0h, 2.5h, 65504.0h};
static const __global Big bigs[2] = {{{1, 2, 3}, 4, 'c', 1.0h, 5}, {}};
static const __global float* const __global ptrs[2] = {tab + 1, tab + 4};
template <class T> T pick(T a, T b, bool c) { return c ? a : b; }
static Big make(int n) { Big b = {}; b.n = n; for (int i = 0; i < 10; ++i) b.a[i] = i * n; return b; }
static float sum(Big b) { float s = 0; for (int i = 0; i < 10; i++) s += b.a[i]; return s + (float)b.h; }
extern "C" void k(device float* p, device int* q, device half* h, uint t, threadgroup float* tg) {
  Big b = make((int)t), c = b;
  c.a[t % 10] = 3;
  p[t] = sum(c) + tab[t % 6] + bigs[t & 1].a[1] + ptrs[t & 1][0];
  V v;
  v.v = (float4)(p[0], p[1], p[2], p[3]);
  V w = v + v;
  p[t] += w.v[t & 3] + w.v.wzyx.y;
  q[t] = q[t] / (int)(t + 1) + q[t] % 7 - (q[t] >> 3) + (q[t] << (t & 31)) + (int)((uint)q[t] / 3u);
  q[t] ^= text[t % 8];
  h[t] = -(h[t] * h[t] + ht[t % 3]) / (half)t;
  switch (q[t]) { case 1: p[t] = 1; case 2: p[t] += 2; break; case 100: return; case -5: p[t] *= 4; break; }
  ulong l = ((ulong)t << 32) | t;
  long m = (long)l * 3;
  q[t + 1] = (int)(m >> 5);
  p[t] = __builtin_fmaf(p[t], 2.0f, 1.0f) + __builtin_sqrtf(p[t]) + __builtin_fabsf(p[t]);
  q[t] += __builtin_popcount(q[t]) + __builtin_clz(q[t] | 1) + __builtin_elementwise_min(q[t], 4);
  int r;
  q[t] = __builtin_mul_overflow(q[t], 3, &r) ? 0 : r;
  __atomic_fetch_add(q, 1, __ATOMIC_RELAXED);
  __atomic_fetch_max(q, 1, __ATOMIC_ACQ_REL);
  __scoped_atomic_fetch_add(p, 1.0f, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  int e = 3;
  __atomic_compare_exchange_n(q, &e, 5, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
  __atomic_store_n(q, 5, __ATOMIC_RELEASE);
  q[1] = __atomic_exchange_n(q, 5, __ATOMIC_RELAXED) + __atomic_load_n(q, __ATOMIC_ACQUIRE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  tg[t] = p[t];
  __msl_threadgroup_barrier(1);
  int4 i4 = __builtin_convertvector(v.v, int4), cmp = v.v > 1.0f;
  q[t] += i4.x + cmp.y;
  float3 f3 = v.v.xyz;
  half4 h4 = __builtin_convertvector(v.v, half4);
  h[t] = h4.w;
  p[t] += f3.z + __builtin_reduce_max(v.v) + __builtin_nanf("");
  for (int i = 0; i < (int)t; i++) {
    if (p[i] < 0) continue;
    for (int j = 0; j < i; j++) { p[i] += __msl_simd_sum_f32(p[j]); if (p[i] > 5) break; }
  }
  for (uint i = 0; i < 8; ++i) q[i] = (q[i] & 3) == 2 ? q[i] * 2 : q[i + 8];
  __builtin_memcpy(p, q, 64);
  volatile int z = 3;
  ((device bool*)q)[100] = pick(true, false, t > (uint)z);
  p[10] = (float)(ulong)l + (float)m;
}
"""
LEVELS = [(level, *debug) for level in ("-O0", "-O1", "-O2", "-O3") for debug in ((), ("-g",))]


@pytest.fixture(scope="module", params=LEVELS, ids=" ".join)
def text(request) -> str:
    return llvm(SOURCE, *request.param)


def test_what_clang_writes_is_printed_as_it_was(text):
    module = ir.parse(text)
    lines = text.split("\n")
    for variable in module.globals.values():
        assert str(variable) == lines[variable.line - 1]
    for function in module.functions.values():
        assert function.header == re.sub(r" \{$", "", lines[function.line - 1])
        for block in function.blocks:
            for instruction in block.instructions:
                printed = f"  {instruction}".split("\n")
                assert printed == lines[instruction.line - 1 :][: len(printed)]


def test_llvm_reads_a_printed_module_as_the_same_module(text):
    def normal(source: str) -> str:
        module = llvmlite.binding.parse_assembly(source, llvmlite.binding.create_context())
        module.verify()
        return re.sub("^; ModuleID.*\n", "", str(module))

    without_records = re.sub(r"^\s*#dbg_.*\n", "", text, flags=re.MULTILINE)
    assert normal(str(ir.parse(text))) == normal(without_records)


# Instructions that clang does not write for the source above, or not at every level.
INSTRUCTIONS = """
%r = add nuw nsw i32 %a, -7
%r = or disjoint i64 %a, 1
%r = lshr exact <4 x i32> %v, splat (i32 3)
%r = fadd reassoc nnan ninf nsz arcp contract afn float %a, 0x3FB99999A0000000
%r = fmul fast <2 x half> %a, <half 0xH3C00, half 0xH7E01>
%r = frem bfloat %a, 0xR3F80
%r = fneg nnan double %a
%r = freeze ptr %a
%r = trunc nuw nsw i64 %a to i32
%r = zext nneg i8 %a to i32
%r = uitofp nneg i32 %a to float
%r = fptrunc contract double %a to float
%r = addrspacecast ptr addrspace(3) %a to ptr
%r = bitcast <2 x i32> %a to i64
%r = inttoptr i64 %a to ptr
%r = icmp samesign ult i32 %a, 4
%r = icmp eq <4 x i1> %a, zeroinitializer
%r = fcmp nnan uno float %a, 0.000000e+00
%r = select nsz i1 %c, float %a, float -1.000000e+00
%r = select <4 x i1> %c, <4 x i8> %a, <4 x i8> poison
%r = alloca [3 x { i8, <{ i32, half }> }], i64 %n, align 16
%r = load atomic volatile i32, ptr %a syncscope("agent") acquire, align 4
store atomic i64 undef, ptr null release, align 8
store volatile <3 x float> %v, ptr addrspace(1) %a, align 4
%r = getelementptr inbounds nuw [4 x %pair], ptr %a, i64 0, i64 %i, i32 1
%r = getelementptr i8, <2 x ptr> %a, <2 x i64> <i64 1, i64 -1>
%r = getelementptr nusw i8, ptr getelementptr inbounds nuw (i8, ptr @table, i64 4), i64 %i
%r = extractelement <4 x float> %v, i64 %i
%r = insertelement <4 x i1> %v, i1 true, i32 0
%r = shufflevector <4 x float> %v, <4 x float> poison, <3 x i32> <i32 0, i32 poison, i32 7>
%r = shufflevector <4 x float> %v, <4 x float> %w, <2 x i32> zeroinitializer
%r = shufflevector <4 x float> %v, <4 x float> %w, <2 x i32> poison
%r = extractvalue { i32, [2 x float] } %a, 1, 0
%r = insertvalue %pair { i32 0, float undef }, float %a, 1
%r = atomicrmw volatile uinc_wrap ptr %a, i32 %b syncscope("workgroup") acq_rel, align 4
%r = atomicrmw fmaximum ptr %a, float 1.000000e+00 monotonic, align 4
%r = cmpxchg weak volatile ptr %a, i32 %b, i32 0 syncscope("agent") seq_cst monotonic, align 4
fence syncscope("singlethread") release
%r = call i32 @plain(i32 noundef range(i32 0, 32) 1, ptr nonnull align 4 dereferenceable(16) %a)
%r = tail call fast fastcc noundef nofpclass(nan inf) float %a(ptr byval(%pair) align 4 captures(none) %b)
call void (ptr, ...) @varied(ptr @table, i32 1) nounwind memory(argmem: readwrite) "key"="value" #0
musttail call void @plain(ptr sret(%pair) align 4 %a) #0 #1
call void @llvm.meta(metadata !"word", metadata i32 4, metadata !0)
%r = phi fast float [ %a, %one ], [ 1.000000e+00, %"two words" ]
br label %"two words"
br i1 false, label %one, label %"two words"
ret { i32, float } { i32 1, float 0x7FF8000000000000 }
ret ptr inttoptr (i64 add (i64 ptrtoint (ptr @table to i64), i64 1) to ptr)
unreachable
switch i8 %a, label %one [;    i8 -1, label %one;    i8 2, label %"two words";  ]
""".strip().split("\n")


@pytest.mark.parametrize("line", INSTRUCTIONS)
def test_an_instruction_is_printed_as_it_was_written(line):
    line = line.replace(";", "\n")
    after = "" if line.startswith(("br", "ret", "unreachable", "switch")) else "\n  ret void"
    text = f"""
%pair = type {{ i32, float }}
@table = external global [4 x i8]
define void @f() {{
one:
  {line}{after}
"two words":
  unreachable
}}
attributes #0 = {{ convergent }}
attributes #1 = {{ nounwind }}
!0 = !{{}}
"""
    assert str(ir.parse(text).functions["f"].entry.instructions[0]) == line


def function(body: str, head: str = "void @f(i32 %x, ptr %p)", tail: str = "") -> ir.Function:
    name = re.search(r"@(\w+)", head)
    assert name is not None
    return ir.parse(f"define {head} {{\n{body}\n}}\n{tail}").functions[name[1]]


def test_operands_are_values_with_their_types():
    add, gep, store, _ = function(
        "%a = add i32 %x, 1\n%q = getelementptr float, ptr %p, i32 %a\nstore float 1.0, ptr %q\nret void"
    ).entry.instructions
    assert isinstance(add, ir.Binary) and isinstance(gep, ir.GetElementPtr) and isinstance(store, ir.Store)
    i32, pointer = ir.IntType(32), ir.PointerType()
    assert add.operands == (ir.Local(i32, "x"), ir.IntConstant(i32, 1))
    assert gep.operands == (ir.Local(pointer, "p"), add.result)
    assert store.operands == (ir.FloatConstant(ir.FloatType("float"), 0x3F800000), gep.result)
    assert store.align == 4


def test_what_has_no_name_is_numbered_as_llvm_does():
    found = function("add i32 %0, 1\nbr label %4\n4:\n%5 = add i32 %3, 1\nret void", "void @f(i32, ptr)")
    assert [p.name for p in found.parameters] == ["0", "1"]
    assert [b.label for b in found.blocks] == ["2", "4"]
    assert [i.name for b in found.blocks for i in b.instructions] == ["3", None, "5", None]


def test_a_terminator_names_each_successor_once():
    switch = "switch i32 %x, label %a [i32 1, label %b i32 2, label %a]"
    body = f"{switch}\na:\nbr i1 true, label %b, label %b\nb:\nret void"
    assert [b.terminator.successors for b in function(body).blocks] == [("a", "b"), ("b",), ()]


def test_attribute_groups_say_what_is_convergent():
    module = ir.parse(
        "define void @f(ptr %p) {\ncall void @meet()\ncall void @plain()\ncall void @plain() #0\n"
        "call void %p()\nret void\n}\ndeclare void @meet() #0\ndeclare void @plain()\n"
        "attributes #0 = { convergent nounwind }"
    )
    calls = [i for i in module.functions["f"].entry.instructions if isinstance(i, ir.Call)]
    assert [module.is_convergent(call) for call in calls] == [True, False, True, False]
    assert [f.convergent for f in module.functions.values()] == [False, True, False]


def test_attributes_carry_types_and_arguments():
    found = function(
        "ret void", "void @f(ptr byval({ i8, i32 }) align 4 %a, i32 range(i32 -1, 7) zeroext %b)"
    )
    byval, align = found.parameters[0].attributes
    assert (byval.name, str(byval.argument)) == ("byval", "{ i8, i32 }")
    assert (align.name, align.argument) == ("align", "4")
    limits = ir.find_attribute(found.parameters[1].attributes, "range")
    assert limits is not None and limits.argument == "i32 -1, 7"
    assert ir.find_attribute(found.parameters[1].attributes, "signext") is None


def test_types_may_be_used_before_they_are_defined():
    module = ir.parse(
        "@x = global %a zeroinitializer\n%a = type { %b, i8 }\n%b = type <{ i8, i32 }>\n%c = type opaque"
    )
    kind = module.globals["x"].type
    assert isinstance(kind, ir.StructType) and str(kind) == "%a" and kind.body == "{ %b, i8 }"
    assert module.types["b"].packed and module.types["c"].fields is None


def test_globals_keep_their_initialisers():
    module = ir.parse(
        '@s = internal constant [3 x i8] c"a\\22\\00", align 1\n@e = external global i32\n'
        "@g = global { ptr, i64 } { ptr getelementptr (i8, ptr @s, i64 1), i64 sub (i64 0, i64 1) }, "
        'section "x"\n'
        "@alias = alias i8, ptr @s"
    )
    assert list(module.globals) == ["s", "e", "g"]
    text = module.globals["s"].initializer
    assert isinstance(text, ir.Bytes) and text.data == b'a"\0' and module.globals["s"].constant
    assert module.globals["e"].initializer is None
    pair = module.globals["g"].initializer
    assert isinstance(pair, ir.Aggregate)
    address, number = pair.elements
    assert isinstance(address, ir.Expression) and address.source == ir.IntType(8)
    assert isinstance(number, ir.Expression) and number.operation == "sub"


@pytest.mark.parametrize("kind", ["half", "bfloat", "float", "double"])
def test_every_float_constant_keeps_its_bits(kind, rng):
    bits = {"half": 16, "bfloat": 16, "float": 32, "double": 64}[kind]
    special = [0, 1, 1 << (bits - 1), (1 << bits) - 1, 0x7F800001 >> (32 - bits) if bits < 32 else 0x7F800001]
    for pattern in [*special, *(int(rng.integers(1 << 63)) * 2 % (1 << bits) for _ in range(500))]:
        constant = ir.FloatConstant(ir.FloatType(kind), pattern)
        read = function(f"ret {kind} {constant}", f"{kind} @f()").entry.instructions[0]
        assert isinstance(read, ir.Return) and read.value == constant


def test_float_constants_are_written_in_decimal_where_that_is_exact():
    def shown(value: float) -> str:
        return str(ir.FloatConstant(ir.FloatType("float"), int(np.float32(value).view(np.uint32))))

    assert [shown(1.5), shown(-0.0), shown(0.1)] == ["1.500000e+00", "-0.000000e+00", "0x3FB99999A0000000"]
    assert int(shown(0.1), 16) == struct.unpack("<Q", struct.pack("<d", float(np.float32(0.1))))[0]


LAYOUT = "e-m:e-p270:32:32-p271:32:32-p272:64:64-i64:64-i128:128-f80:128-n8:16:32:64-S128"
TYPES = """
i1; i8; i16; i24; i32; i64; i128; half; bfloat; float; double; ptr; {}; [0 x i32]; <2 x ptr>; <3 x i8>;
<2 x float>; <3 x float>; <4 x float>; <16 x float>; <3 x half>; <4 x i1>; <9 x i1>; [5 x <3 x float>];
{ i8, i32 }; { i8, i64, half }; <{ i8, i64, half }>; { i8, { i16, i8 }, <3 x float>, i1 }; { [3 x i8], i128 };
[2 x { double, i8 }]
"""


@pytest.mark.parametrize("kind", [" ".join(kind.split()) for kind in TYPES.split(";")])
def test_sizes_and_alignments_are_llvms(kind):
    text = f'target datalayout = "{LAYOUT}"\n@x = external global {kind}'
    module = ir.parse(text)
    found = module.globals["x"].type
    assert str(found) == kind
    other = llvmlite.binding.parse_assembly(text, llvmlite.binding.create_context())
    data = llvmlite.binding.create_target_data(LAYOUT)
    element = other.get_global_variable("x").global_value_type
    assert module.layout.size(found) == data.get_abi_size(element)
    assert module.layout.align(found) == data.get_abi_alignment(element)
    if isinstance(found, ir.StructType) and found.fields:
        offsets = [data.get_element_offset(element, i) for i in range(len(found.fields))]
        assert list(module.layout.offsets(found)) == offsets


def test_store_sizes_leave_padding_out():
    layout = ir.DataLayout.parse(LAYOUT)
    kinds = [ir.VectorType(3, ir.FloatType("float")), ir.VectorType(9, ir.IntType(1)), ir.IntType(24)]
    assert [layout.store_size(k) for k in kinds] == [12, 2, 3]
    assert [layout.size(k) for k in kinds] == [16, 2, 4]


def test_an_instruction_leads_back_to_its_line_through_inlining():
    module = ir.parse(
        llvm(
            "__attribute__((always_inline)) static int twice(int x) {\n  return x +\n    x;\n}\n"
            'extern "C" void f(device int* p) {\n  p[0] =\n    twice(p[1]);\n}'
        )
    )
    add = next(i for b in module.functions["f"].blocks for i in b.instructions if isinstance(i, ir.Binary))
    place = module.location(add)
    assert place is not None and place.inlined_at is not None
    assert (place.file, place.line, place.function) == ("kernel", 2, "twice")
    assert (place.inlined_at.line, place.inlined_at.column, place.inlined_at.function) == (7, 5, "f")
    assert str(place) == "kernel:2:12 (inlined at kernel:7:5)"


def test_stack_slots_bear_the_names_of_their_variables():
    module = ir.parse(llvm('extern "C" void f(device int* p) { int count = p[0]; p[1] = count; }'))
    f = module.functions["f"]
    slots = [i.name for i in f.entry.instructions if isinstance(i, ir.Alloca)]
    assert [module.variable(f, slot) for slot in slots] == ["p", "count"]


def test_metadata_is_read_generically():
    module = ir.parse(
        '!named = !{!0}\n!0 = distinct !{!0, !"a\\22b", i32 7, null, !1, !DIExpression(DW_OP_deref, 4)}\n'
        '!1 = !DIThing(name: "x", line: -3, flags: FlagA | FlagB, set: true, to: !0, value: i8 1)'
    )
    node, thing = module.metadata[0], module.metadata[1]
    assert module.named_metadata == {"named": (0,)} and node.distinct and node.kind == ""
    assert (
        node.operands[1] == 'a"b' and node.operands[3] is None and node.operands[4] == ir.MetadataReference(1)
    )
    assert thing.kind == "DIThing"
    assert [thing.fields[k] for k in ("name", "line", "flags", "set")] == ["x", -3, "FlagA | FlagB", True]
    assert thing.fields["value"] == ir.IntConstant(ir.IntType(8), 1)


@pytest.mark.parametrize(
    ("body", "construct"),
    [
        ("%a = landingpad i32 cleanup", "'landingpad'"),
        ("invoke void @g() to label %x unwind label %y", "'invoke'"),
        ("indirectbr ptr %p, [label %x]", "'indirectbr'"),
        ('call void asm "nop", ""()', "inline assembly"),
        ("%a = add <vscale x 4 x i32> %x, %x", "scalable vector"),
        ("%a = fadd x86_fp80 %x, %x", "x86_fp80"),
        ("%a = frob i32 %x", "'frob'"),
        ("%a = fadd float %x, 0.1", "0.1"),
        ("%a = icmp less i32 %x, 1", "less"),
        ("br label %nowhere", "%nowhere"),
        ("%a = load %unknown, ptr %p", "%unknown"),
        ("call void @g() #7", "#7"),
        ('call void @g() [ "align"(ptr %p) ]', "operand bundle"),
        ("%a = add i32 %x, `", "'`'"),
    ],
)
def test_what_is_not_known_is_named_with_its_line(body, construct):
    with pytest.raises(ir.IRError) as caught:
        function(f"\n{body}\nret void")
    assert construct in caught.value.construct
    assert caught.value.line == 3
    assert "line 3" in str(caught.value)


def test_big_endian_is_refused():
    with pytest.raises(ir.IRError, match="big-endian"):
        ir.parse('target datalayout = "E-p:64:64"')
