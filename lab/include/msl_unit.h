// What a generated unit needs besides the library: the dispatch records, storage, binding, and description of types.
#pragma once
#include "metal_stdlib"
#include "msl_launch.h"

// ---- storage ------------------------------------------------------------------------------------------

// Program-scope tables lie in __global, as the compiler demands; code sees them in Metal's constant memory.
template <class T>
constexpr constant T& msl_constant(const __global T& x) {
    return (constant T&)x;
}

// A function constant without a value: storage that is nowhere defined, so that its use shows in the code.
template <class T, uint number>
extern const __global T msl_undefined;

// A block of the threadgroup's memory. The executor gives each id of a kernel a place of its own.
extern "C" __attribute__((const, nothrow)) __local char* msl_threadgroup_block(uint id, uint size);

template <class T, uint id>
inline __local T& msl_threadgroup() {
    return *(__local T*)msl_threadgroup_block(id, sizeof(T));
}

// ---- conditional expressions ------------------------------------------------------------------------------

// In `c ? a : b` the compiler takes a class in two address spaces for two types, such as that of a local float4 and of
// float4(0). So the rewriter puts `msl_branch(),` before each branch: a class loses its address space, and all else
// stays what it is (void too, for which the comma is the built-in one).
//
// A bfloat branch beside one of another number: bfloat converts to every number and an integer to bfloat, so it stands
// as a class that only goes to float and bfloat, and that integers convert to. Put before the whole, `msl_chosen(),`
// makes it a bfloat again.
struct msl_branch {};
struct msl_chosen {};
struct msl_bfloat_branch {
    ushort bits;
    METAL_FUNC constexpr explicit msl_bfloat_branch(bfloat x) : bits(x.bits_) {}
    template <class I, msl_impl::only_if_t<msl_impl::is_int<I>, int> = 0>
    METAL_FUNC constexpr msl_bfloat_branch(I x) : bits(bfloat(x).bits_) {}
    METAL_FUNC constexpr operator bfloat() const { return bfloat::from_bits(bits); }
    template <class F, msl_impl::only_if_t<msl_impl::same<F, float>, int> = 0>  // and so to nothing beyond float
    METAL_FUNC constexpr operator F() const { return msl_impl::bfloat_to_float(bits); }
};
template <class T, msl_impl::only_if_t<msl_impl::same<msl_impl::bare_t<T>, msl_bfloat_branch>, int> = 0>
METAL_FUNC constexpr bfloat operator,(msl_chosen, T&& x) {
    return bfloat::from_bits(x.bits);
}
template <class T>
struct msl_bare {
    using type = T;
};
template <class T>
struct msl_bare<T&> : msl_bare<T> {};
template <class T>
struct msl_bare<T&&> : msl_bare<T> {};
template <class T>
struct msl_bare<const T> : msl_bare<T> {};
#define MSL_BARE(...)                        \
    template <class T>                       \
    struct msl_bare<__VA_ARGS__ T> {         \
        using type = T;                      \
    };                                       \
    template <class T>                       \
    struct msl_bare<const __VA_ARGS__ T> {   \
        using type = T;                      \
    };
MSL_BARE(__private)
MSL_BARE(__global)
MSL_BARE(__local)
MSL_BARE(__generic)
MSL_BARE(__attribute__((opencl_global_host)))
#undef MSL_BARE
template <class T>
constexpr bool msl_is_class = __is_class(typename msl_bare<T>::type) || __is_union(typename msl_bare<T>::type);
template <class T, msl_impl::only_if_t<msl_is_class<T>, int> = 0>
METAL_FUNC constexpr auto operator,(msl_branch, T&& x) {
    if constexpr (msl_impl::same<typename msl_bare<T>::type, bfloat>) return msl_bfloat_branch(x);
    else return typename msl_bare<T>::type(x);
}
template <class T, msl_impl::only_if_t<!msl_is_class<T>, int> = 0>
METAL_FUNC constexpr T&& operator,(msl_branch, T&& x) {
    return static_cast<T&&>(x);
}

// The function type of a pointer to functions.
template <class P>
struct msl_function_of;
template <class R, class... A>
struct msl_function_of<R (*)(A...)> {
    using type = R(A...);
};
template <class P>
using msl_function = typename msl_function_of<P>::type;

struct msl_temporary {};  // the last parameter of methods for temporaries

// ---- offsets ------------------------------------------------------------------------------------------

// In `p += x` the operand x for a p of type L: a class that stands for a number, where p is a pointer, is that number.
template <class L, class T, msl_impl::only_if_t<__is_pointer(L) && msl_is_class<T>, int> = 0>
METAL_FUNC constexpr long msl_offset(T&& x) {
    return static_cast<long>(x);
}
template <class L, class T, msl_impl::only_if_t<!(__is_pointer(L) && msl_is_class<T>), int> = 0>
METAL_FUNC constexpr T&& msl_offset(T&& x) {
    return static_cast<T&&>(x);
}

// ---- binding ------------------------------------------------------------------------------------------

template <class F>
struct msl_signature;
template <class R, class... A>
struct msl_signature<R(A...)> {
    template <uint i>
    using argument = __type_pack_element<i, A...>;
};

template <class P>
struct msl_bind;
template <class T>
struct msl_bind<T*> {
    T* pointer;
    explicit msl_bind(ulong address) : pointer((T*)address) {}
    T* get() { return pointer; }
};
template <class T>
struct msl_bind<T&> {
    T* pointer;
    explicit msl_bind(ulong address) : pointer((T*)address) {}
    T& get() { return *pointer; }
};
// Constant memory does not change during a dispatch: a copy lets the optimiser keep its fields in registers.
template <class T, bool small = sizeof(T) <= 512>
struct msl_constant_copy {
    struct holder {  // so that an array is copied like anything else
        T value;
    };
    holder copy;
    explicit msl_constant_copy(ulong address) : copy(*(constant holder*)address) {}
    constant T& get() { return *(constant T*)(__generic T*)&copy.value; }
};
template <class T>
struct msl_constant_copy<T, false> {
    constant T* pointer;
    explicit msl_constant_copy(ulong address) : pointer((constant T*)address) {}
    constant T& get() { return *pointer; }
};
template <class T>
struct msl_bind<constant T&> : msl_constant_copy<T> {
    explicit msl_bind(ulong address) : msl_constant_copy<T>(address) {}
};

// An argument that a function constant leaves out: never used, for the same constant guards its use.
template <class P>
struct msl_absent {
    static P get() { return P(); }
};
template <class T>
struct msl_absent<T&> {
    static T& get() { return *(T*)(ulong)64; }
};

// Size of a threadgroup along one axis: the last one holds what is left.
inline uint msl_extent(uint left, uint size) { return left < size ? left : size; }

// [[threadgroup(n)]] arguments lie after the kernel's own storage, one after the other.
inline ulong msl_threadgroup_offset(const msl_launch& launch, uint index) {
    ulong offset = 0;
    for (uint i = 0; i < index; ++i) offset += (launch.threadgroup_bytes[i] + 15ul) & ~15ul;
    return offset;
}

// A thread attribute in the type the kernel declares it with.
template <class P>
struct msl_attribute {
    static P make(uint x, uint, uint) { return (P)x; }
};
template <class T>
struct msl_attribute<metal::vec<T, 2>> {
    static metal::vec<T, 2> make(uint x, uint y, uint) { return metal::vec<T, 2>((T)x, (T)y); }
};
template <class T>
struct msl_attribute<metal::vec<T, 3>> {
    static metal::vec<T, 3> make(uint x, uint y, uint z) { return metal::vec<T, 3>((T)x, (T)y, (T)z); }
};

// ---- description: lab/source/layout.py reads these numbers from the unit's constants --------------------

enum msl_scalar : uint {
    msl_void, msl_bool, msl_i8, msl_u8, msl_i16, msl_u16, msl_i32, msl_u32, msl_i64, msl_u64,
    msl_f16, msl_bf16, msl_f32, msl_f64, msl_unknown, msl_struct = 100
};

template <class T>
struct msl_struct_id {
    enum { value = -1 };
};

template <class T, bool is_enum = __is_enum(T)>
struct msl_element {  // a struct or something we have no name for
    static constexpr uint scalar = msl_struct_id<T>::value < 0 ? msl_unknown : msl_struct + msl_struct_id<T>::value;
    static constexpr uint components = 1, columns = 1;
};
template <class T>
struct msl_element<T, true> : msl_element<__underlying_type(T)> {};
template <>
struct msl_element<void> {
    static constexpr uint scalar = msl_void, components = 1, columns = 1;
};
#define MSL_SCALAR(T, name)                                          \
    template <>                                                      \
    struct msl_element<T> {                                          \
        static constexpr uint scalar = name, components = 1, columns = 1; \
    };
MSL_SCALAR(bool, msl_bool)
MSL_SCALAR(char, msl_i8)
MSL_SCALAR(signed char, msl_i8)
MSL_SCALAR(uchar, msl_u8)
MSL_SCALAR(short, msl_i16)
MSL_SCALAR(ushort, msl_u16)
MSL_SCALAR(int, msl_i32)
MSL_SCALAR(uint, msl_u32)
MSL_SCALAR(long, msl_i64)
MSL_SCALAR(ulong, msl_u64)
MSL_SCALAR(long long, msl_i64)
MSL_SCALAR(unsigned long long, msl_u64)
MSL_SCALAR(half, msl_f16)
MSL_SCALAR(bfloat, msl_bf16)
MSL_SCALAR(float, msl_f32)
#undef MSL_SCALAR
template <class T, int N>
struct msl_element<metal::vec<T, N>> {
    static constexpr uint scalar = msl_element<T>::scalar, components = N, columns = 1;
};
template <class T, int N>
struct msl_element<metal::packed_vec<T, N>> {
    static constexpr uint scalar = msl_element<T>::scalar, components = N, columns = 1;
};
template <class T, int C, int R>
struct msl_element<metal::matrix<T, C, R>> {
    static constexpr uint scalar = msl_element<T>::scalar, components = R, columns = C;
};
template <class T>
struct msl_element<metal::atomic<T>> : msl_element<T> {};

template <class T>
struct msl_unqualified {  // without qualifiers and address space
    using type = T;
    static constexpr uint space = 0, is_const = 0;
};
template <class T>
struct msl_unqualified<__global T> : msl_unqualified<T> {
    static constexpr uint space = 1;
};
template <class T>
struct msl_unqualified<__attribute__((opencl_global_host)) T> : msl_unqualified<T> {
    static constexpr uint space = 2;
};
template <class T>
struct msl_unqualified<__local T> : msl_unqualified<T> {
    static constexpr uint space = 3;
};
template <class T>
struct msl_unqualified<const T> : msl_unqualified<T> {
    static constexpr uint is_const = 1;
};
template <class T>
struct msl_unqualified<volatile T> : msl_unqualified<T> {};
template <class T>
struct msl_unqualified<const __global T> : msl_unqualified<T> {
    static constexpr uint space = 1, is_const = 1;
};
template <class T>
struct msl_unqualified<volatile __global T> : msl_unqualified<__global T> {};
template <class T>
struct msl_unqualified<const volatile __global T> : msl_unqualified<const __global T> {};
template <class T>
struct msl_unqualified<const __attribute__((opencl_global_host)) T> : msl_unqualified<T> {
    static constexpr uint space = 2, is_const = 1;
};
template <class T>
struct msl_flat {  // without array extents
    using type = T;
    static constexpr uint count = 1;
};
template <class T, ulong N>
struct msl_flat<T[N]> {
    using type = typename msl_flat<T>::type;
    static constexpr uint count = (uint)N * msl_flat<T>::count;
};
template <class T>
struct msl_plain : msl_unqualified<typename msl_flat<T>::type> {
    static constexpr uint count = msl_flat<T>::count;
};

template <class P>
struct msl_pointee {
    using type = P;
    static constexpr uint indirection = 0;
};
template <class T>
struct msl_pointee<T*> {
    using type = T;
    static constexpr uint indirection = 1;
};
template <class T>
struct msl_pointee<T&> {
    using type = T;
    static constexpr uint indirection = 2;
};

template <class T>
constexpr uint msl_sizeof = sizeof(T);
template <>
inline constexpr uint msl_sizeof<void> = 1;

// Five numbers of a type: scalar, components, columns, size of one element, count.
#define MSL_FIELD(...)                                                                                  \
    msl_element<msl_plain<__VA_ARGS__>::type>::scalar, msl_element<msl_plain<__VA_ARGS__>::type>::components, \
    msl_element<msl_plain<__VA_ARGS__>::type>::columns, msl_sizeof<msl_plain<__VA_ARGS__>::type>,       \
    msl_plain<__VA_ARGS__>::count
// Eight numbers: indirection, address space, const, then the five of what it points to.
#define MSL_DESCRIBE(...)                                                                               \
    msl_pointee<__VA_ARGS__>::indirection, msl_plain<msl_pointee<__VA_ARGS__>::type>::space,            \
    msl_plain<msl_pointee<__VA_ARGS__>::type>::is_const, MSL_FIELD(msl_pointee<__VA_ARGS__>::type)
