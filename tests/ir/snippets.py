"""Snippets of C++ for OpenCL as IR, with declarations of the lab's primitives before them."""

from __future__ import annotations

from lab.ir import Module, parse
from lab.source.toolchain import clang

FLAGS = (
    "-x", "clcpp", "-cl-std=clc++2021", "-Xclang", "-cl-ext=+cl_khr_fp16", "-cl-single-precision-constant",
    "-cl-no-stdinc", "-fdeclspec", "-ffreestanding", "-nostdinc", "-fmax-type-align=4",
    "-fno-strict-aliasing", "-fno-finite-loops", "-ffp-contract=off", "-target", "x86_64-linux-gnu",
    "-Wno-unknown-attributes",
)  # fmt: skip

PRELUDE = """
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define device __global
#define threadgroup __local
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef int int4 __attribute__((ext_vector_type(4)));
typedef float float3 __attribute__((ext_vector_type(3)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef half half4 __attribute__((ext_vector_type(4)));
struct msl_launch { ulong buffer[32]; uint grid[3], groups[3], size[3]; uint threadgroup_bytes[32]; };
struct msl_group { const msl_launch* launch; ulong threadgroup_memory; uint position[3], size[3]; };
extern "C" __attribute__((const, nothrow)) uint __msl_lane(void);
extern "C" __attribute__((const, nothrow)) threadgroup char* msl_threadgroup_block(uint id, uint size);
#define MEETING extern "C" __attribute__((convergent, nothrow))
MEETING void __msl_threadgroup_barrier(uint);
MEETING void __msl_simdgroup_barrier(uint);
MEETING float __msl_simd_sum_f32(float);
MEETING uint __msl_simd_sum_u32(uint);
MEETING uint __msl_simd_product_u32(uint);
MEETING ulong __msl_simd_sum_u64(ulong);
MEETING float __msl_simd_max_f32(float);
MEETING float __msl_simd_min_f32(float);
MEETING int __msl_simd_max_i32(int);
MEETING uint __msl_simd_max_u32(uint);
MEETING uint __msl_simd_and_u32(uint);
MEETING ulong __msl_simd_xor_u64(ulong);
MEETING uint __msl_simd_prefix_exclusive_sum_u32(uint);
MEETING float __msl_simd_prefix_inclusive_product_f32(float);
MEETING uint __msl_simd_shuffle(uint, uint);
MEETING uint __msl_simd_broadcast_first(uint);
MEETING ulong __msl_simd_ballot(uint);
MEETING uint __msl_quad_sum_u32(uint);
MEETING uint __msl_quad_shuffle(uint, uint);
MEETING ulong __msl_quad_ballot(uint);
template <class T>
device T* buffer(const msl_group* g, int index) {
    return (device T*)g->launch->buffer[index];
}
"""


def llvm(source: str, *flags: str) -> str:
    """The IR of ``source``, which stands after the prelude and counts its own lines, at -O0 by default."""
    text = f'{PRELUDE}\n#line 1 "kernel"\n{source}'
    done = clang([*FLAGS, *(flags or ("-O0", "-g")), "-S", "-emit-llvm", "-o", "-", "-"], text)
    assert done.returncode == 0, done.stderr
    return done.stdout


def kernel(body: str, *flags: str, before: str = "") -> Module:
    """The module whose thread function, with parameters ``g`` and ``tid``, is ``body``; lines are its own."""
    entry = 'extern "C" void msl_thread(const msl_group* g, uint tid) {'
    return parse(llvm(f'{before}\n{entry}\n#line 1 "body"\n{body}\n}}', *flags))
