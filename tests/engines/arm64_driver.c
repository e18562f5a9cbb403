// Runs kernels compiled for arm64 under an emulator: reads each buffer from a file, and writes it back afterwards.
// With ALONE it does without a C library and without the engine's workers: the executors alone.
//
//     driver KERNEL GRID THREADGROUP SHARED CANCEL FILE...
//
// SHARED: bytes of [[threadgroup(0)]]. CANCEL: whether to stop the dispatch once it runs.
#include "runtime.h"

#include <fcntl.h>
#include <unistd.h>

typedef struct Kernel {
    const char* name;
    void (*groups)(const Launch* launch, uint64_t first, uint64_t count, volatile uint64_t* progress);
    void (*thread)(const Group* group, uint32_t index);
    uint64_t storage;
} Kernel;

#include "kernels.h"  // declares the kernels and lists them in `kernels`

int lab_start(int count);
int lab_run(Job* job, uint64_t nanoseconds);
int lab_wait(Job* job, uint64_t nanoseconds, int seen);
void lab_cancel(Job* job);

static uint64_t number(const char* text) {
    uint64_t value = 0;
    while (*text) value = value * 10 + (uint64_t)(*text++ - '0');
    return value;
}

static void print(int64_t value) {
    char text[24], *at = text + sizeof text;
    uint64_t rest = value < 0 ? -(uint64_t)value : (uint64_t)value;
    *--at = ' ';
    do *--at = (char)('0' + rest % 10);
    while (rest /= 10);
    if (value < 0) *--at = '-';
    write(1, at, (size_t)(text + sizeof text - at));
}

static void dispatch(Job* job, int cancel) {
#ifdef ALONE
    static Worker worker;
    (void)cancel;
    if (job->run_groups) job->run_groups(job->launch, 0, job->total, &worker.group);
    else lab_run_fibers(&worker, job, 0, job->total);
#else
    lab_start(2);
    int ended = lab_run(job, 50000000);
    if (cancel && !ended) lab_cancel(job);
    while (!ended) ended = lab_wait(job, 50000000, 0);
#endif
}

int main(int count, char** arguments) {
    if (count < 6) return 2;
    const Kernel* kernel = kernels;
    while (kernel->name && strcmp(kernel->name, arguments[1]) != 0) ++kernel;
    if (!kernel->name) return 3;
    static Launch launch;
    uint32_t grid = (uint32_t)number(arguments[2]), size = (uint32_t)number(arguments[3]);
    uint32_t shared = (uint32_t)number(arguments[4]);
    for (int axis = 0; axis < 3; ++axis) launch.grid[axis] = launch.groups[axis] = launch.size[axis] = 1;
    launch.grid[0] = grid, launch.size[0] = size, launch.groups[0] = (grid + size - 1) / size;
    launch.threadgroup_bytes[0] = shared;
    uint64_t length[32] = {0};
    for (int i = 6; i < count; ++i) {
        int file = open(arguments[i], O_RDWR);
        length[i - 6] = (uint64_t)lseek(file, 0, SEEK_END);
        char* memory = mmap(NULL, length[i - 6], PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (memory == MAP_FAILED) return 4;
        launch.buffer[i - 6] = (uint64_t)(uintptr_t)memory;
        close(file);
    }
    static Job job;
    job.run_groups = kernel->groups, job.run_thread = kernel->thread;
    job.launch = &launch, job.total = launch.groups[0], job.chunk = 1;
    job.storage = kernel->storage, job.shared = kernel->storage + (shared + 15) / 16 * 16;
    dispatch(&job, number(arguments[5]) != 0);
    print(job.state), print(job.signal), print((int64_t)job.group), print(job.thread), print(job.region);
    print(job.threads[0]), print(job.threads[1]), print(job.sites[0]), print(job.sites[1]);
    print((int64_t)(job.address - launch.buffer[0]));
    return 0;
}

#ifdef ALONE  // what the executors need of a C library, on Linux

int lab_claim_fault(Job* job, int32_t what) {
    if (job->state != RUNNING) return 0;
    job->state = FAULTED, job->signal = what;
    return 1;
}

char* lab_reserve_around(size_t size) {
    char* memory = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANON | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static long call(long name, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = name, x0 __asm__("x0") = a, x1 __asm__("x1") = b, x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d, x4 __asm__("x4") = e, x5 __asm__("x5") = f;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}

int open(const char* path, int flags, ...) { return (int)call(56, AT_FDCWD, (long)path, flags, 0, 0, 0); }
int close(int file) { return (int)call(57, file, 0, 0, 0, 0, 0); }
off_t lseek(int file, off_t offset, int from) { return call(62, file, offset, from, 0, 0, 0); }
ssize_t write(int file, const void* data, size_t size) { return call(64, file, (long)data, (long)size, 0, 0, 0); }
int munmap(void* at, size_t size) { return (int)call(215, (long)at, (long)size, 0, 0, 0, 0); }
int mprotect(void* at, size_t size, int access) { return (int)call(226, (long)at, (long)size, access, 0, 0, 0); }
int madvise(void* at, size_t size, int advice) { return (int)call(233, (long)at, (long)size, advice, 0, 0, 0); }
void* mmap(void* at, size_t size, int access, int flags, int file, off_t offset) {
    long result = call(222, (long)at, (long)size, access, flags, file, offset);
    return result < 0 && result > -4096 ? MAP_FAILED : (void*)result;
}
int strcmp(const char* a, const char* b) {
    while (*a && *a == *b) ++a, ++b;
    return (unsigned char)*a - (unsigned char)*b;
}
void* memset(void* to, int value, size_t size) {
    for (volatile char* at = to; size--;) *at++ = (char)value;
    return to;
}
void* memcpy(void* restrict to, const void* restrict from, size_t size) {
    volatile char* at = to;
    for (const char* source = from; size--;) *at++ = *source++;
    return to;
}

__attribute__((used)) static void begin(long* stack) {
    call(94, main((int)stack[0], (char**)(stack + 1)), 0, 0, 0, 0, 0);  // exit_group
}
__asm__(".text\n .globl _start\n _start:\n mov x0, sp\n mov x29, xzr\n b begin\n");

#endif
