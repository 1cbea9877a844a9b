/* Pinned host memory: memory of the process that GPUs access at the same address. It takes no memory of a GPU. */
#ifndef SIMGPU_PINNED_MEMORY_H
#define SIMGPU_PINNED_MEMORY_H

#include "driver.h"

struct pinned_memory {
    CUdeviceptr address;
    size_t bytes;
    uint64_t id;
    struct context *context;
    struct pinned_memory *next;
};

/* The pinned memory of this process that holds the whole range, or NULL. Under simgpu_objects. */
const struct pinned_memory *simgpu_find_pinned_memory(CUdeviceptr address, size_t bytes);

#endif
