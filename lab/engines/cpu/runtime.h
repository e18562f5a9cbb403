// Shared by the parts of the CPU engine's runtime. lab/engines/cpu/native.py mirrors Job.
#pragma once
#define _GNU_SOURCE
#define _DARWIN_C_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>

typedef struct Launch {  // msl_launch
    uint64_t buffer[32];
    uint32_t grid[3], groups[3], size[3], threadgroup_bytes[32];
} Launch;

typedef struct Group {  // msl_group
    const Launch* launch;
    uint64_t threadgroup_memory;
    uint32_t position[3], size[3];
} Group;

enum { RUNNING = 0, FAULTED = 1, CANCELLED = 2 };
enum { UNMET_BARRIER = -1, NO_MEMORY = -2 };  // in place of a signal

enum { PLAIN = 0, STACK_GUARD = 1, THREADGROUP_MEMORY = 2 };

// One dispatch. The caller owns it until `lab_wait` says it is done.
typedef struct Job {
    void (*run_groups)(const Launch* launch, uint64_t first, uint64_t count, volatile uint64_t* progress);
    void (*run_thread)(const Group* group, uint32_t index);  // used where `run_groups` is null: threads as fibers
    const Launch* launch;
    uint64_t total, chunk;  // threadgroups, and how many a worker takes at a time
    uint64_t storage;       // bytes of threadgroup memory that the kernel declares
    uint64_t shared;        // bytes of threadgroup memory in all
    uint64_t shared_at;     // where a faulting worker's threadgroup memory begins
    _Atomic uint64_t next;
    _Atomic int32_t state;  // RUNNING, or why it stopped early
    int32_t wanted;         // workers still to join
    int32_t active;         // workers in it
    int32_t workers;        // of the pool
    int32_t signal;         // of the first fault
    uint64_t address;       // the address it touched
    uint64_t group;         // the threadgroup it happened in
    int64_t thread;         // index of the thread in its threadgroup, -1 where not known
    int32_t region;         // PLAIN, or what the address lies beside
    int32_t threads[2], sites[2];  // an unmet barrier: two threads, and the barriers they wait at
} Job;

struct Fibers;

typedef struct Worker {
    pthread_t thread;
    sigjmp_buf escape;
    volatile sig_atomic_t in_kernel;
    volatile sig_atomic_t telling;  // it writes down a fault, and leaves the kernel by itself
    Job* volatile job;
    volatile uint64_t group;
    char *stack, *alternate;
    struct Fibers* fibers;  // made when first needed, kept
} Worker;

// The first of several things to go wrong is the one that is told.
int lab_claim_fault(Job* job, int32_t what);

// `size` bytes of address space in the middle of much more, all of it without access. NULL where there is none.
char* lab_reserve_around(size_t size);

// fibers.c
void lab_run_fibers(Worker* worker, Job* job, uint64_t first, uint64_t count);
int64_t lab_fiber_thread(const struct Fibers* fibers);
int lab_fiber_region(const struct Fibers* fibers, const char* address);
uint64_t lab_fiber_shared(const struct Fibers* fibers, const Job* job);
