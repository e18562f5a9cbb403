// Primitives of a simdgroup for code without branches between them: every lane runs alone, as often as it meets others
// plus once. In run number n its first n meetings have their results; the next one records what the lane brings.
#pragma clang diagnostic ignored "-Wmissing-exception-spec"
extern "C" {
static uint lane_, meeting_, run_;
static ulong brought_[256][32];

uint __msl_lane(void) { return lane_; }
static bool meet(ulong x) {
  if (meeting_ == run_) brought_[meeting_][lane_] = x;
  return meeting_++ < run_;
}
#define BROUGHT(T, i) from_bits<T>(brought_[meeting_ - 1][i])
}
template <class T> ulong to_bits(T x) {
  if constexpr (sizeof(T) == 8) return as_type<ulong>(x);
  else return as_type<uint>(x);
}
template <class T> T from_bits(ulong u) {
  if constexpr (sizeof(T) == 8) return as_type<T>(u);
  else return as_type<T>(uint(u));
}
// Groups of `size` lanes; a prefix takes the lanes before, and with `self` this one, too.
#define REDUCTION(name, type, T, start, expression)                                            \
  extern "C" T __msl_##name##_##type(T x) {                                                    \
    if (!meet(to_bits(x))) return x;                                                           \
    T a = start;                                                                               \
    for (uint i = lane_ - lane_ % size; i < (prefix ? lane_ + self : lane_ - lane_ % size + size); i++) { \
      T b = BROUGHT(T, i);                                                                     \
      a = expression;                                                                          \
    }                                                                                          \
    return a;                                                                                  \
  }
#define FOR_TYPES(name, zero_f, zero_i, expression)                                            \
  REDUCTION(name, f32, float, zero_f, expression) REDUCTION(name, i32, int, zero_i, expression) \
  REDUCTION(name, u32, uint, zero_i, expression) REDUCTION(name, i64, long, zero_i, expression) \
  REDUCTION(name, u64, ulong, zero_i, expression)
#define FOR_WORDS(name, zero, expression)                                                      \
  REDUCTION(name, u32, uint, zero, expression) REDUCTION(name, u64, ulong, zero, expression)
#define FIRST BROUGHT(T, lane_ - lane_ % size)
#define GROUP(g, lanes)                                                                        \
  namespace g##_whole {                                                                          \
  constexpr uint size = lanes, self = 0;                                                       \
  constexpr bool prefix = false;                                                               \
  FOR_TYPES(g##_sum, 0, 0, a + b) FOR_TYPES(g##_product, 1, 1, a * b)                          \
  FOR_TYPES(g##_min, BROUGHT(T_OF(x), lane_), BROUGHT(T_OF(x), lane_), b < a ? b : a)          \
  FOR_TYPES(g##_max, BROUGHT(T_OF(x), lane_), BROUGHT(T_OF(x), lane_), b > a ? b : a)          \
  FOR_WORDS(g##_and, ~0ul, a & b) FOR_WORDS(g##_or, 0, a | b) FOR_WORDS(g##_xor, 0, a ^ b)     \
  extern "C" uint __msl_##g##_shuffle(uint x, uint lane) {                                     \
    return meet(x) ? BROUGHT(uint, lane_ - lane_ % size + lane) : x;                           \
  }                                                                                            \
  extern "C" uint __msl_##g##_broadcast_first(uint x) {                                        \
    return meet(x) ? BROUGHT(uint, lane_ - lane_ % size) : x;                                  \
  }                                                                                            \
  extern "C" ulong __msl_##g##_ballot(uint x) {                                                \
    if (!meet(x)) return 0;                                                                    \
    ulong mask = 0;                                                                            \
    for (uint i = 0; i < size; i++) mask |= ulong(BROUGHT(uint, lane_ - lane_ % size + i) != 0) << i; \
    return mask;                                                                               \
  }                                                                                            \
  }                                                                                            \
  namespace g##_before {                                                                       \
  constexpr uint size = lanes, self = 0;                                                       \
  constexpr bool prefix = true;                                                                \
  FOR_TYPES(g##_prefix_exclusive_sum, 0, 0, a + b) FOR_TYPES(g##_prefix_exclusive_product, 1, 1, a * b) \
  }                                                                                            \
  namespace g##_upto {                                                                         \
  constexpr uint size = lanes, self = 1;                                                       \
  constexpr bool prefix = true;                                                                \
  FOR_TYPES(g##_prefix_inclusive_sum, 0, 0, a + b) FOR_TYPES(g##_prefix_inclusive_product, 1, 1, a * b) \
  }
#define T_OF(x) __typeof__(x)
GROUP(simd, 32)
GROUP(quad, 4)
