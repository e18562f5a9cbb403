// The general executor: every thread of a threadgroup is a fiber with a stack of its own.
//
// A thread runs until it meets others: at a collective of its simdgroup, or at a barrier of its threadgroup. There
// it hands over to the next lane that can run. When no lane of a simdgroup can, those that wait at a collective
// are sorted by where they wait: the same call in the same iteration of every loop around it is one meeting, and
// the meeting that comes first in program order is held, because nobody who waits elsewhere can still come to it.
// The last lane to arrive does the arithmetic for all and goes on without a switch.
//
// lowering.py gives every call of a primitive its Site: the operation and the path to it, loop by loop.

#include "runtime.h"

enum { LANES = 32, THREADS = 1024, STACK = 64 << 10, SHARED = 32 << 10, PAGE = 16 << 10 };

typedef struct Site {
    uint32_t operation;  // kind | type << 8 | quad << 16
    uint32_t index;      // which call this is, for messages
    uint32_t levels;     // loops around it
    uint32_t last;       // its position in the innermost of them (or in the function)
    uint32_t path[];     // for each loop from outside: its position where it stands, and the slot of its counter
} Site;

enum { SUM, PRODUCT, MIN, MAX, AND, OR, XOR, INCLUSIVE_SUM, EXCLUSIVE_SUM, INCLUSIVE_PRODUCT, EXCLUSIVE_PRODUCT,
       SHUFFLE, FIRST, BALLOT, NOTHING };
enum { F32, I32, U32, I64, U64 };

typedef struct Context {
    void *sp, *ip, *fp;
} Context;

typedef float Float4 __attribute__((vector_size(16)));

// What each lane brings to a meeting, or takes from it. Narrow and wide values lie apart, because lanes that wait at
// different meetings hold both kinds at the same time.
typedef struct Words {
    union {
        float f[LANES];
        int32_t i[LANES];
        uint32_t u[LANES];
        Float4 f4[LANES / 4];
    };
    union {
        int64_t l[LANES];
        uint64_t w[LANES];
    };
} Words;

typedef struct Simdgroup {
    uint32_t ready, waiting, barrier;  // lanes that can run, wait at a collective, wait at a barrier
    uint32_t fresh;                    // whether it has not met since the last barrier, and is not alone
    Words in, out;
    uint64_t key[LANES];              // where each waits: the site's index, above it the counters of its loops mixed
    uint32_t argument[LANES];
    const uint32_t* counters[LANES];  // of every loop around a site, kept by the lane
    Context context[LANES];
} Simdgroup;

typedef struct Fibers {
    Group group;  // first: kernels know it by this address
    Simdgroup* simdgroup;  // the lane that runs
    uint32_t lane;
    const Site* const* sites;  // of the kernel, by index
    Context scheduler;
    Job* job;
    char *stacks, *memory;
    uint32_t stride;  // stacks from one guard to the next
    Simdgroup simdgroups[THREADS / LANES];
} Fibers;

static uint32_t thread_of(const Fibers* f, const Simdgroup* s, uint32_t lane) {
    return (uint32_t)(s - f->simdgroups) * LANES + lane;
}

int64_t lab_fiber_thread(const Fibers* f) { return f && f->simdgroup ? (int64_t)thread_of(f, f->simdgroup, f->lane) : -1; }

// The memory lies at the end of its pages, so that the first byte beyond it faults.
uint64_t lab_fiber_shared(const Fibers* f, const Job* job) {
    return f ? (uint64_t)(uintptr_t)(f->memory + SHARED - job->shared) : 0;
}

// Up to the largest reach of a 32-bit index around it, an address is told by what it lies nearest to.
int lab_fiber_region(const Fibers* f, const char* address) {
    if (!f) return PLAIN;
    const ptrdiff_t reach = (ptrdiff_t)32 << 30, stacks = (ptrdiff_t)THREADS * STACK;
    if (address >= f->stacks && address < f->stacks + stacks)
        return (size_t)(address - f->stacks) % ((size_t)f->stride * STACK) < PAGE ? STACK_GUARD : PLAIN;
    if (address >= f->memory - reach && address < f->memory + SHARED + reach) return THREADGROUP_MEMORY;
    return PLAIN;
}

// ---- switching ---------------------------------------------------------------------------------------------

// What runs next finds the fibers, its simdgroup and its lane in registers: taken from its own stack they would
// have to wait for the stack pointer, and the next switch for them.
#if defined(__x86_64__)
#define SWITCH_TO(from, to, f, s, lane)                                                                             \
    do {                                                                                                            \
        Context *from_ = (from), *to_ = (to);                                                                       \
        register uint64_t lane_ __asm__("r8") = (lane);                                                             \
        __asm__ volatile(                                                                                           \
            "leaq 1f(%%rip), %%rax\n movq %%rsp, (%0)\n movq %%rax, 8(%0)\n movq %%rbp, 16(%0)\n"                   \
            "movq (%1), %%rsp\n movq 16(%1), %%rbp\n jmpq *8(%1)\n 1:\n"                                           \
            : "+D"(from_), "+S"(to_), "+d"(f), "+c"(s), "+r"(lane_)::"rax", "rbx", "r9", "r10", "r11", "r12",       \
              "r13", "r14", "r15", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9",  \
              "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15", "memory", "cc");                                \
        lane = (uint32_t)lane_;                                                                                     \
    } while (0)
#define TRAMPOLINE "movq %rbp, %rdi\n xorl %ebp, %ebp\n call "
#define TRAP "\n ud2\n"
#elif defined(__aarch64__)
#if defined(__APPLE__)
#define X18  // the system's own there, and not to be named
#else
#define X18 "x18",
#endif
#define SWITCH_TO(from, to, f, s, lane)                                                                             \
    do {                                                                                                            \
        register Context* from_ __asm__("x0") = (from);                                                             \
        register Context* to_ __asm__("x1") = (to);                                                                 \
        register Fibers* f_ __asm__("x2") = (f);                                                                    \
        register Simdgroup* s_ __asm__("x3") = (s);                                                                 \
        register uint64_t lane_ __asm__("x4") = (lane);                                                             \
        __asm__ volatile(                                                                                           \
            "adr x9, 1f\n mov x10, sp\n stp x10, x9, [x0]\n str x29, [x0, #16]\n"                                  \
            "ldp x10, x9, [x1]\n ldr x29, [x1, #16]\n mov sp, x10\n br x9\n 1:\n"                                 \
            : "+r"(from_), "+r"(to_), "+r"(f_), "+r"(s_), "+r"(lane_)::"x5", "x6", "x7", "x8", "x9", "x10", "x11",  \
              "x12", "x13", "x14", "x15", "x16", "x17", X18 "x19", "x20", "x21", "x22", "x23", "x24", "x25", "x26",     \
              "x27", "x28", "x30", "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v12", \
              "v13", "v14", "v15", "v16", "v17", "v18", "v19", "v20", "v21", "v22", "v23", "v24", "v25", "v26",     \
              "v27", "v28", "v29", "v30", "v31", "memory", "cc");                                                   \
        f = f_, s = s_, lane = (uint32_t)lane_;                                                                     \
    } while (0)
#define TRAMPOLINE "mov x0, x29\n mov x29, xzr\n bl "
#define TRAP "\n brk #1\n"
#else
#error "no context switch for this processor"
#endif

#if defined(__APPLE__)
#define NAME(x) "_" x
#else
#define NAME(x) x
#endif

// Where a fiber begins: its frame pointer carries the Fibers it belongs to.
void lab_fiber_begin(void);
__asm__(".text\n .globl " NAME("lab_fiber_begin") "\n" NAME("lab_fiber_begin") ":\n" TRAMPOLINE NAME("lab_fiber_main") TRAP);

// ---- arithmetic of a meeting ---------------------------------------------------------------------------------

#define EACH(mask, l) for (uint32_t m_ = (mask), l; m_ && ((l = (uint32_t)__builtin_ctz(m_)), 1); m_ &= m_ - 1)

#define FOLD(field, first, step)                        \
    {                                                   \
        __typeof__(s->in.field[0]) a = first;           \
        EACH(who, l) { __typeof__(a) x = s->in.field[l]; a = step; } \
        FILL(field, a)                                  \
    }                                                   \
    break;

#define FILL(field, a)                                  \
    for (uint32_t l = base; l < base + width; ++l) s->out.field[l] = a;

#define SCAN(field, first, step, inclusive)             \
    {                                                   \
        __typeof__(s->in.field[0]) a = first;           \
        EACH(who, l) {                                  \
            __typeof__(a) x = s->in.field[l], b = a;    \
            a = step;                                   \
            s->out.field[l] = inclusive ? a : b;        \
        }                                               \
    }                                                   \
    break;

#define ARITHMETIC(type, field)                                        \
    case SUM | type << 8: FOLD(field, 0, a + x)                        \
    case PRODUCT | type << 8: FOLD(field, 1, a * x)                    \
    case INCLUSIVE_SUM | type << 8: SCAN(field, 0, a + x, 1)           \
    case EXCLUSIVE_SUM | type << 8: SCAN(field, 0, a + x, 0)           \
    case INCLUSIVE_PRODUCT | type << 8: SCAN(field, 1, a * x, 1)       \
    case EXCLUSIVE_PRODUCT | type << 8: SCAN(field, 1, a * x, 0)

#define ORDER(type, field)                                                           \
    case MIN | type << 8: FOLD(field, s->in.field[__builtin_ctz(who)], x < a ? x : a) \
    case MAX | type << 8: FOLD(field, s->in.field[__builtin_ctz(who)], x > a ? x : a)

#define BITS(type, field)                               \
    case AND | type << 8: FOLD(field, ~0, a & x)        \
    case OR | type << 8: FOLD(field, 0, a | x)          \
    case XOR | type << 8: FOLD(field, 0, a ^ x)

// Hold one meeting among the lanes `who`, all of one simdgroup or quadgroup that starts at lane `base`.
static void hold(Simdgroup* s, uint32_t who, uint32_t operation, uint32_t base, uint32_t width) {
    switch (operation) {
        ARITHMETIC(F32, f) ARITHMETIC(I32, i) ARITHMETIC(U32, u) ARITHMETIC(I64, l) ARITHMETIC(U64, w)
        ORDER(I32, i) ORDER(U32, u) ORDER(I64, l) ORDER(U64, w)
        BITS(U32, u) BITS(U64, w)
        // As fmin and fmax: a NaN gives way to a number.
        case MIN | F32 << 8: FOLD(f, __builtin_nanf(""), (x < a || a != a) ? x : a)
        case MAX | F32 << 8: FOLD(f, __builtin_nanf(""), (x > a || a != a) ? x : a)
        case SHUFFLE | U32 << 8:
            EACH(who, l) {
                uint32_t from = base + s->argument[l] % width;
                s->out.u[l] = who >> from & 1 ? s->in.u[from] : 0;  // from a lane that is not here: undefined, 0
            }
            break;
        case FIRST | U32 << 8: {
            uint32_t value = s->in.u[__builtin_ctz(who)];
            EACH(who, l) s->out.u[l] = value;
            break;
        }
        case BALLOT | U64 << 8: {
            uint64_t votes = 0;
            EACH(who, l) votes |= (uint64_t)(s->in.w[l] != 0) << (l - base);
            EACH(who, l) s->out.w[l] = votes;
            break;
        }
        default: break;
    }
}

// The sums of neighbouring elements of two vectors.
#define PAIRS(x, y) (__builtin_shufflevector(x, y, 0, 2, 4, 6) + __builtin_shufflevector(x, y, 1, 3, 5, 7))

static const Site* site_of(const Fibers* f, const Simdgroup* s, uint32_t lane) { return f->sites[s->key[lane] & 0xffff]; }

static void meet(const Fibers* f, Simdgroup* s, uint32_t who) {
    uint32_t operation = site_of(f, s, (uint32_t)__builtin_ctz(who))->operation;
    if (operation == (SUM | F32 << 8) && who == ~0u) {  // the most frequent of all, in vectors
        // Neighbours first, then pairs, and so on, as Apple's GPUs add: the sum is theirs to the bit.
        Float4* v = s->in.f4;
        Float4 low = PAIRS(PAIRS(v[0], v[1]), PAIRS(v[2], v[3]));
        Float4 high = PAIRS(PAIRS(v[4], v[5]), PAIRS(v[6], v[7]));
        Float4 a = PAIRS(low, high);
        float total = (a[0] + a[1]) + (a[2] + a[3]);
        for (uint32_t i = 0; i < LANES / 4; ++i) s->out.f4[i] = (Float4){total, total, total, total};
        return;
    }
    if (operation >> 16 == 0) {
        hold(s, who, operation, 0, LANES);
        return;
    }
    for (uint32_t base = 0; base < LANES; base += 4) {
        uint32_t some = who & (15u << base);
        if (some) hold(s, some, operation & 0xffff, base, 4);
    }
}

// Which of two waiting lanes waits at the earlier place: negative, positive, or 0 for the same meeting.
static int order(const Fibers* f, const Simdgroup* s, uint32_t a, uint32_t b) {
    const Site *x = site_of(f, s, a), *y = site_of(f, s, b);
    for (uint32_t i = 0;; ++i) {
        uint32_t p = i < x->levels ? x->path[2 * i] : x->last;
        uint32_t q = i < y->levels ? y->path[2 * i] : y->last;
        if (p != q) return p < q ? -1 : 1;
        if (i == x->levels || i == y->levels) return 0;
        uint32_t slot = x->path[2 * i + 1], m = s->counters[a][slot], n = s->counters[b][slot];
        if (m != n) return m < n ? -1 : 1;
    }
}

// Whether the lanes `who` all wait at the meeting `key`.
static inline int together(const Simdgroup* s, uint32_t who, uint64_t key) {
    uint64_t differ = 0;
    if (who == ~0u) {
        for (uint32_t l = 0; l < LANES; ++l) differ |= s->key[l] ^ key;
    } else {
        EACH(who, l) differ |= s->key[l] ^ key;
    }
    return differ == 0;
}

// Nobody of the simdgroup can run and somebody waits: hold the earliest meeting. Returns who took part.
static uint32_t release(const Fibers* f, Simdgroup* s) {
    uint32_t who = s->waiting, earliest = (uint32_t)__builtin_ctz(who);
    if (!together(s, who, s->key[earliest])) {
        EACH(s->waiting, l) {
            if (order(f, s, l, earliest) < 0) earliest = l;
        }
        who = 0;
        EACH(s->waiting, l) {
            if (order(f, s, l, earliest) == 0) who |= 1u << l;
        }
    }
    meet(f, s, who);
    s->ready = who;
    s->waiting &= ~who;
    return who;
}

// ---- lanes -----------------------------------------------------------------------------------------------------

// Go on with the first lane that can; back here when this lane is the one.
#define RESUME(f, s, lane)                                                         \
    do {                                                                           \
        uint32_t now_ = (lane);                                                    \
        lane = (uint32_t)__builtin_ctz((s)->ready);                                \
        (f)->lane = lane;                                                          \
        SWITCH_TO(&(s)->context[now_], &(s)->context[lane], f, s, lane);           \
    } while (0)

// The lane cannot go on: hand over to another one, or to the scheduler.
static inline __attribute__((always_inline)) void leave(Fibers* f, Simdgroup* s, uint32_t lane) {
    s->ready &= ~(1u << lane);
    if (!s->ready && s->waiting) release(f, s);
    if (s->ready) RESUME(f, s, lane);
    else SWITCH_TO(&s->context[lane], &f->scheduler, f, s, lane);
}

// The simdgroup has met for the first time since a barrier: let the others come as far. They run side by side on
// a GPU, and kernels that read threadgroup memory after a barrier, meet, and write it again rely on that.
#define STEP_BACK(f, s, lane)                                               \
    do {                                                                    \
        (s)->fresh = 0;                                                     \
        SWITCH_TO(&(s)->context[lane], &(f)->scheduler, f, s, lane);        \
    } while (0)

// Wait at the meeting `key`, whose values are in `s->in`; the lane's result is then in `s->out`.
#define COLLECTIVE(f, s, lane, at)                                          \
    do {                                                                    \
        (s)->key[lane] = (at);                                              \
        (s)->waiting |= 1u << (lane);                                       \
        (s)->ready &= ~(1u << (lane));                                      \
        if ((s)->ready || !(release(f, s) >> (lane) & 1)) RESUME(f, s, lane); \
        else if ((s)->fresh) STEP_BACK(f, s, lane);                         \
    } while (0)

// A kernel saves what it holds in registers, not these functions: it knows what that is, and a switch saves nothing.
#define FROM_KERNEL __attribute__((preserve_none))

// A thread begins: where it keeps its counters, and the kernel's sites.
FROM_KERNEL void lab_enter(Fibers* f, const uint32_t* counters, const Site* const* sites) {
    f->simdgroup->counters[f->lane] = counters;
    f->sites = sites;
}

FROM_KERNEL uint32_t lab_meet(Fibers* f, uint64_t key, uint32_t bits) {
    Simdgroup* s = f->simdgroup;
    uint32_t lane = f->lane;
    s->in.u[lane] = bits;
    COLLECTIVE(f, s, lane, key);
    return s->out.u[lane];
}

FROM_KERNEL uint64_t lab_meet64(Fibers* f, uint64_t key, uint64_t bits) {
    Simdgroup* s = f->simdgroup;
    uint32_t lane = f->lane;
    s->in.w[lane] = bits;
    COLLECTIVE(f, s, lane, key);
    return s->out.w[lane];
}

FROM_KERNEL uint32_t lab_shuffle(Fibers* f, uint64_t key, uint32_t bits, uint32_t from) {
    f->simdgroup->argument[f->lane] = from;
    return lab_meet(f, key, bits);
}

FROM_KERNEL void lab_barrier(Fibers* f, uint64_t key) {
    Simdgroup* s = f->simdgroup;
    s->key[f->lane] = key;
    s->barrier |= 1u << f->lane;
    leave(f, s, f->lane);
}

__attribute__((used)) void lab_fiber_main(Fibers* f) {
    f->job->run_thread(&f->group, thread_of(f, f->simdgroup, f->lane));
    leave(f, f->simdgroup, f->lane);
}

// ---- threadgroups ------------------------------------------------------------------------------------------------

// Stacks with a guard below each, or below every `stride`th where there are so many workers that the system would
// run out of separate ranges; an overflow then runs through stacks of the same threadgroup before it is caught.
static Fibers* make_fibers(uint32_t stride) {
    size_t control = (sizeof(Fibers) + PAGE - 1) / PAGE * PAGE;
    char* memory = mmap(NULL, control, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    Fibers* f = (Fibers*)memory;
    f->memory = lab_reserve_around(SHARED + 2 * PAGE);
    f->stacks = lab_reserve_around((size_t)THREADS * STACK);
    f->stride = stride;
    int bad = !f->memory || !f->stacks;
    if (!bad) {
        f->memory += PAGE;  // no access on either side, however little room there is
        bad = mprotect(f->memory, SHARED, PROT_READ | PROT_WRITE);
    }
    for (uint32_t i = 0; i < THREADS && !bad; i += stride)
        bad = mprotect(f->stacks + (size_t)i * STACK + PAGE, (size_t)stride * STACK - PAGE, PROT_READ | PROT_WRITE);
    return bad ? NULL : f;
}

static void begin(Fibers* f, uint32_t threads) {
    for (uint32_t base = 0; base < threads; base += LANES) {
        Simdgroup* s = &f->simdgroups[base / LANES];
        uint32_t lanes = threads - base < LANES ? threads - base : LANES;
        s->ready = lanes == LANES ? ~0u : (1u << lanes) - 1;
        s->waiting = s->barrier = s->fresh = 0;
        for (uint32_t l = 0; l < lanes; ++l) {
            // Stacks begin at different cache lines, or a thousand of them would share a few sets of the cache.
            char* top = f->stacks + (size_t)(base + l + 1) * STACK - ((base + l) * 7 % 32) * 64 - 64;
            s->context[l] = (Context){top, (void*)lab_fiber_begin, f};
        }
    }
}

// All threads that have not returned wait at barriers: it must be one and the same.
static int one_barrier(Fibers* f, uint32_t simdgroups) {
    const Simdgroup* first = NULL;
    uint32_t lane = 0;
    for (uint32_t g = 0; g < simdgroups; ++g) {
        const Simdgroup* s = &f->simdgroups[g];
        if (!s->barrier) continue;
        if (!first) first = s, lane = (uint32_t)__builtin_ctz(s->barrier);
        if (together(s, s->barrier, first->key[lane])) continue;
        EACH(s->barrier, l) {
            if (s->key[l] == first->key[lane] || !lab_claim_fault(f->job, UNMET_BARRIER)) continue;
            f->job->threads[0] = (int32_t)thread_of(f, first, lane);
            f->job->sites[0] = (int32_t)site_of(f, first, lane)->index;
            f->job->threads[1] = (int32_t)thread_of(f, s, l);
            f->job->sites[1] = (int32_t)site_of(f, s, l)->index;
        }
        return 0;
    }
    return 1;
}

static int run_group(Fibers* f, uint32_t threads) {
    uint32_t simdgroups = (threads + LANES - 1) / LANES;
    begin(f, threads);
    for (;;) {
        uint32_t waiting = 0, ready = 0;
        for (uint32_t g = 0; g < simdgroups; ++g) {
            Simdgroup* s = &f->simdgroups[g];
            if (s->ready) {
                f->simdgroup = s;
                f->lane = (uint32_t)__builtin_ctz(s->ready);
                uint32_t lane = f->lane;
                SWITCH_TO(&f->scheduler, &s->context[lane], f, s, lane);
            }
            waiting |= f->simdgroups[g].barrier;
            ready |= f->simdgroups[g].ready;
        }
        if (ready) continue;
        if (!waiting) return 1;
        if (!one_barrier(f, simdgroups)) return 0;
        for (uint32_t g = 0; g < simdgroups; ++g) {
            Simdgroup* s = &f->simdgroups[g];
            s->ready = s->barrier;
            s->barrier = 0;
            s->fresh = simdgroups > 1;
        }
    }
}

static uint32_t extent(uint32_t grid, uint32_t position, uint32_t size) {
    uint32_t left = grid - position * size;
    return left < size ? left : size;
}

void lab_run_fibers(Worker* w, Job* job, uint64_t first, uint64_t count) {
    if (!w->fibers) w->fibers = make_fibers(job->workers > 16 ? 8 : 1);
    Fibers* f = w->fibers;
    if (!f) {
        lab_claim_fault(job, NO_MEMORY);
        return;
    }
    const Launch* launch = job->launch;
    f->job = job;
    f->simdgroup = NULL;
    f->group.launch = launch;
    f->group.threadgroup_memory = lab_fiber_shared(f, job) + job->storage;
    for (uint64_t index = first; index < first + count; ++index) {
        uint32_t threads = 1;
        uint64_t rest = index;
        for (int axis = 0; axis < 3; ++axis) {
            f->group.position[axis] = (uint32_t)(rest % launch->groups[axis]);
            rest /= launch->groups[axis];
            f->group.size[axis] = extent(launch->grid[axis], f->group.position[axis], launch->size[axis]);
            threads *= f->group.size[axis];
        }
        w->group = index;
        if (atomic_load_explicit(&job->state, memory_order_relaxed) != RUNNING || !run_group(f, threads)) return;
    }
}
