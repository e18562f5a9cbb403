// The CPU engine's threads: a pool of workers that run dispatches, catch their faults, and can be stopped.
//
// Compiled once per machine by the compiler that also compiles kernels, and loaded into the process.
// Kernels run on workers only. While a dispatch runs, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP and SIGURG have
// handlers of ours: a fault of a worker inside a kernel ends that dispatch and nothing else; anybody else's
// fault goes to the handler that was there before. After the dispatch the old handlers are back.

#include "runtime.h"

#include <sys/resource.h>

enum { MAX_WORKERS = 256, STACK = 4 << 20, GUARD = 1 << 20, ALTERNATE = 64 << 10 };

// Around each stack, where address space is not rationed: an index into a private array wrong by 32 bits faults.
static const size_t AROUND = (size_t)64 << 30;

static Worker workers[MAX_WORKERS];
static int worker_count;
static pthread_mutex_t lock;
static pthread_cond_t work, done;
static Job* current;
static atomic_int finished;  // counts dispatches; a waiter spins on it before it sleeps

static const int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGURG};
enum { SIGNALS = sizeof signals / sizeof signals[0] };
static struct sigaction before[SIGNALS];

static Worker* self(void) {
    pthread_t me = pthread_self();
    for (int i = 0; i < worker_count; ++i)
        if (pthread_equal(workers[i].thread, me)) return &workers[i];
    return NULL;
}

int lab_claim_fault(Job* job, int32_t what) {
    int32_t expected = RUNNING;
    Worker* w = self();
    if (w) w->telling = 1;
    if (atomic_compare_exchange_strong(&job->state, &expected, FAULTED)) {
        job->signal = what;
        if (w) job->group = w->group;
        return 1;
    }
    if (w) w->telling = 0;
    return 0;
}

static void on_signal(int number, siginfo_t* info, void* context) {
    (void)context;
    Worker* w = self();
    if (w && w->in_kernel) {
        Job* job = w->job;
        if (number == SIGURG) {
            if (atomic_load(&job->state) == RUNNING) return;
        } else {
            if (lab_claim_fault(job, number)) {
                char* address = (char*)info->si_addr;
                int fibers = job->run_groups == NULL;
                job->address = (uint64_t)(uintptr_t)address;
#if defined(__linux__) && defined(__x86_64__)
                // An address that no memory can have comes without the address.
                if (number == SIGSEGV && info->si_code == SI_KERNEL) job->address = UINT64_MAX;
#endif
                job->thread = fibers ? lab_fiber_thread(w->fibers) : -1;
                job->region = fibers ? lab_fiber_region(w->fibers, address)
                                     : address >= w->stack && address < w->stack + GUARD;
                job->shared_at = fibers ? lab_fiber_shared(w->fibers, job) : 0;
            }
        }
        w->in_kernel = 0;
        siglongjmp(w->escape, 1);
    }
    if (w && number == SIGURG) return;  // it has left the kernel already
    for (int i = 0; i < SIGNALS; ++i) {
        if (signals[i] != number) continue;
        struct sigaction ours;
        sigaction(number, &before[i], &ours);  // not ours: the instruction runs again and meets what was before us
        if (info->si_code > 0 && info->si_code != SI_USER) return;
        raise(number);  // it was sent, and does not come again
        sigaction(number, &ours, NULL);
    }
}

static void run(Worker* w, Job* job) {
    w->job = job;
    w->telling = 0;
    if (sigsetjmp(w->escape, 1) == 0) {
        while (atomic_load_explicit(&job->state, memory_order_relaxed) == RUNNING) {
            uint64_t first = atomic_fetch_add_explicit(&job->next, job->chunk, memory_order_relaxed);
            if (first >= job->total) break;
            uint64_t left = job->total - first;
            w->group = first;
            uint64_t count = left < job->chunk ? left : job->chunk;
            w->in_kernel = 1;
            if (job->run_groups) job->run_groups(job->launch, first, count, &w->group);
            else lab_run_fibers(w, job, first, count);
            w->in_kernel = 0;
        }
    }
    w->in_kernel = 0;
}

// Get every worker out of the dispatch's kernel. With the lock held; one that is just entering is missed.
static void expel(const Job* job) {
    for (int i = 0; i < worker_count; ++i)
        if (workers[i].job == job && workers[i].in_kernel && !workers[i].telling)
            pthread_kill(workers[i].thread, SIGURG);
}

static void* serve(void* argument) {
    Worker* w = argument;
    stack_t alternate = {.ss_sp = w->alternate, .ss_size = ALTERNATE, .ss_flags = 0};
    sigaltstack(&alternate, NULL);
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!current || current->wanted == 0) pthread_cond_wait(&work, &lock);
        Job* job = current;
        --job->wanted;
        ++job->active;
        pthread_mutex_unlock(&lock);
        run(w, job);
        pthread_mutex_lock(&lock);
        if (atomic_load(&job->state) != RUNNING) expel(job);  // others may wait for what this one did not do
        if (--job->active == 0 && (job->wanted == 0 || atomic_load(&job->next) >= job->total ||
                                   atomic_load(&job->state) != RUNNING)) {
            job->wanted = 0;
            current = NULL;
            atomic_fetch_add(&finished, 1);
            pthread_cond_broadcast(&done);
        }
    }
    return NULL;
}

static int installed;

static void handlers(int install) {
    if (install == installed) return;
    installed = install;
    struct sigaction ours;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_signal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    for (int i = 0; i < SIGNALS; ++i) {
        if (install) sigaction(signals[i], &ours, &before[i]);
        else sigaction(signals[i], &before[i], NULL);
    }
}

char* lab_reserve_around(size_t size) {
    struct rlimit limit;
    int rationed = getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
    for (size_t around = rationed ? GUARD : AROUND;; around /= 4) {
        if (around < GUARD) around = 0;
        char* memory = mmap(NULL, size + 2 * around, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
        if (memory != MAP_FAILED) return memory + around;
        if (!around) return NULL;
    }
}

// Start `count` workers. Called once per process, and again in a forked child. Returns how many run.
int lab_start(int count) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&work, NULL);
    pthread_cond_init(&done, NULL);
    current = NULL;
    worker_count = 0;
    if (count > MAX_WORKERS) count = MAX_WORKERS;
    sigset_t all, old;
    sigfillset(&all);
    for (int i = 0; i < SIGNALS; ++i) sigdelset(&all, signals[i]);
    pthread_sigmask(SIG_SETMASK, &all, &old);  // the process's other signals are for its own threads
    for (int i = 0; i < count; ++i) {
        Worker* w = &workers[i];
        struct Fibers* fibers = w->fibers;  // memory that a forked child inherits
        memset(w, 0, sizeof *w);
        w->fibers = fibers;
        size_t size = (size_t)GUARD + STACK + ALTERNATE;
        char* memory = lab_reserve_around(size);
        if (!memory || mprotect(memory + GUARD, STACK + ALTERNATE, PROT_READ | PROT_WRITE) != 0) break;
        w->stack = memory;
        w->alternate = memory + GUARD + STACK;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstack(&attributes, memory + GUARD, STACK);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        if (pthread_create(&w->thread, &attributes, serve, w) != 0) break;
        pthread_attr_destroy(&attributes);
        ++worker_count;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return worker_count;
}

static int is_done(const Job* job) { return current != job; }

// Wait up to `nanoseconds` for the dispatch; returns 1 when it is done and the old handlers are back.
int lab_wait(Job* job, uint64_t nanoseconds, int seen) {
    for (int i = 0; i < 400 && atomic_load_explicit(&finished, memory_order_acquire) == seen; ++i) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __asm__ volatile("yield");
#endif
    }
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += (time_t)(nanoseconds / 1000000000u);
    until.tv_nsec += (long)(nanoseconds % 1000000000u);
    if (until.tv_nsec >= 1000000000) until.tv_sec += 1, until.tv_nsec -= 1000000000;
    pthread_mutex_lock(&lock);
    int timed_out = 0;
    while (!is_done(job) && !timed_out) timed_out = pthread_cond_timedwait(&done, &lock, &until) != 0;
    int result = is_done(job);
    if (!result && atomic_load(&job->state) != RUNNING) expel(job);
    pthread_mutex_unlock(&lock);
    if (result) handlers(0);
    return result;
}

// Begin the dispatch and wait up to `nanoseconds`, as `lab_wait`. One dispatch at a time: the caller sees to it.
int lab_run(Job* job, uint64_t nanoseconds) {
    uint64_t chunks = (job->total + job->chunk - 1) / job->chunk;
    job->wanted = chunks < (uint64_t)worker_count ? (int32_t)chunks : worker_count;
    job->active = 0;
    if (job->total == 0) return 1;
    handlers(1);
    int seen = atomic_load(&finished);
    pthread_mutex_lock(&lock);
    current = job;
    if (job->wanted == 1) pthread_cond_signal(&work);
    else pthread_cond_broadcast(&work);
    pthread_mutex_unlock(&lock);
    return lab_wait(job, nanoseconds, seen);
}

// Stop the dispatch: workers leave their kernels where they are. Returns when all have, so that a second
// interruption finds nothing left half done.
void lab_cancel(Job* job) {
    int32_t expected = RUNNING;
    atomic_compare_exchange_strong(&job->state, &expected, CANCELLED);
    pthread_mutex_lock(&lock);
    if (current == job) {
        job->wanted = 0;
        if (job->active == 0) current = NULL;
        expel(job);
    }
    pthread_mutex_unlock(&lock);
    while (!lab_wait(job, 5000000, 0)) continue;
}

// ---- memory for buffers that kernels write: reserved ranges with no access around what is used -------------

void* lab_reserve(uint64_t size) {
    void* memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

int lab_commit(void* address, uint64_t size) { return mprotect(address, size, PROT_READ | PROT_WRITE); }

// Give the pages back to the system and close them.
void lab_decommit(void* address, uint64_t size) {
    mmap(address, size, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

// ---- what compiled kernels call on x86-64 processors without half precision --------------------------------

#if defined(__x86_64__)
static uint32_t bits_of(float f) {
    uint32_t x;
    memcpy(&x, &f, 4);
    return x;
}

float __extendhfsf2(_Float16 value) {
    uint16_t h;
    memcpy(&h, &value, 2);
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, e = (h >> 10) & 31u, m = h & 0x3ffu, bits;
    if (e == 31) bits = sign | 0x7f800000u | (m << 13);
    else if (e) bits = sign | ((e + 112) << 23) | (m << 13);
    else if (!m) bits = sign;
    else {
        e = 113;
        while (!(m & 0x400u)) m <<= 1, --e;
        bits = sign | (e << 23) | ((m & 0x3ffu) << 13);
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

_Float16 __truncsfhf2(float f) {
    uint32_t x = bits_of(f), sign = (x >> 16) & 0x8000u, a = x & 0x7fffffffu, out;
    if (a > 0x7f800000u) out = 0x7e00u | ((a >> 13) & 0x3ffu);
    else if (a >= 0x47800000u) out = 0x7c00u;
    else if (a < 0x33000000u) out = 0;
    else {
        uint32_t e = a >> 23, m = (a & 0x7fffffu) | 0x800000u;
        uint32_t shift = e < 113 ? 126 - e : 13, half = 1u << (shift - 1), rest = m & ((1u << shift) - 1);
        out = m >> shift;
        if (e >= 113) out += (e - 113) << 10;
        if (rest > half || (rest == half && (out & 1))) ++out;
    }
    uint16_t h = (uint16_t)(sign | out);
    _Float16 result;
    memcpy(&result, &h, 2);
    return result;
}

__bf16 __truncsfbf2(float f) {
    uint32_t x = bits_of(f);
    uint16_t h = (x & 0x7fffffffu) > 0x7f800000u ? (uint16_t)((x >> 16) | 0x40u)
                                                 : (uint16_t)((x + 0x7fffu + ((x >> 16) & 1u)) >> 16);
    __bf16 result;
    memcpy(&result, &h, 2);
    return result;
}
#endif
