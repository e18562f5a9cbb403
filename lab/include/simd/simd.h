// Apple's simd names for the same types, for headers shared with a host program.
#if !defined(SIMD_SIMD_H) && !defined(MSL_PREPROCESSING)
#define SIMD_SIMD_H
#include <metal_stdlib>

namespace simd {
using namespace metal;
}
#define MSL_SIMD_NAMES(T)                                                                                            \
  typedef T##2 vector_##T##2; typedef T##3 vector_##T##3; typedef T##4 vector_##T##4;                                \
  typedef T##2 simd_##T##2; typedef T##3 simd_##T##3; typedef T##4 simd_##T##4;
#define MSL_SIMD_MATRIX(T, C)                                                                                        \
  typedef T##C##x2 matrix_##T##C##x2; typedef T##C##x3 matrix_##T##C##x3; typedef T##C##x4 matrix_##T##C##x4;        \
  typedef T##C##x2 simd_##T##C##x2; typedef T##C##x3 simd_##T##C##x3; typedef T##C##x4 simd_##T##C##x4;
MSL_SIMD_NAMES(char)
MSL_SIMD_NAMES(uchar)
MSL_SIMD_NAMES(short)
MSL_SIMD_NAMES(ushort)
MSL_SIMD_NAMES(int)
MSL_SIMD_NAMES(uint)
MSL_SIMD_NAMES(long)
MSL_SIMD_NAMES(ulong)
MSL_SIMD_NAMES(half)
MSL_SIMD_NAMES(float)
MSL_SIMD_MATRIX(float, 2) MSL_SIMD_MATRIX(float, 3) MSL_SIMD_MATRIX(float, 4)
MSL_SIMD_MATRIX(half, 2) MSL_SIMD_MATRIX(half, 3) MSL_SIMD_MATRIX(half, 4)
#undef MSL_SIMD_NAMES
#undef MSL_SIMD_MATRIX
#endif
