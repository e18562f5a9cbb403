// What an executor hands to a kernel: the dispatch and the threadgroup. lab/engines/launch.py mirrors both.
#pragma once

struct msl_launch {
    ulong buffer[32];            // address of each bound buffer
    uint grid[3];                // threads_per_grid
    uint groups[3];              // threadgroups_per_grid
    uint size[3];                // dispatch_threads_per_threadgroup
    uint threadgroup_bytes[32];  // size of each [[threadgroup(n)]] argument
};

struct msl_group {
    const msl_launch* launch;
    ulong threadgroup_memory;
    uint position[3];  // threadgroup_position_in_grid
    uint size[3];      // threads_per_threadgroup: smaller than launch->size in a partial group
};
