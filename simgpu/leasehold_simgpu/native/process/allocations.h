/* The device memory that this process has allocated.
 *
 * An allocation reserves a range of virtual addresses, which nothing can read or write. Its bytes are at an offset in
 * the memory slot of the process on a GPU. The address does not change when the process is moved. The bytes are on
 * the GPU while the process is resident, and otherwise in `copies`.
 */
#ifndef SIMGPU_ALLOCATIONS_H
#define SIMGPU_ALLOCATIONS_H

#include "memory/host_copies.h"
#include "process/context_stack.h"

struct memory_pool {
    uint32_t ordinal;
    uint64_t settings[5]; /* by attribute: three reuse policies and the release threshold */
    uint64_t used;        /* by the allocations of the pool, in bytes */
    uint64_t used_high;
};

struct allocation {
    CUdeviceptr address;
    size_t bytes;
    uint64_t id;
    uint32_t ordinal;
    uint64_t offset; /* physical: in the memory slot */
    struct context *context;
    struct memory_pool *pool;
    struct host_copy *copies;
    struct allocation *next; /* by ordinal, then offset */
};

/* All allocations. Changed under simgpu_objects, and only by calls that pass the gate. While the gate is closed and
 * drained, the list may be read without the lock. */
extern struct allocation *simgpu_allocations;

/* The id of the next buffer of this process, on a GPU or in pinned host memory. Under simgpu_objects. */
uint64_t simgpu_next_buffer_id(void);

/* The allocation that holds this address, or NULL. Under simgpu_objects. */
struct allocation *simgpu_find_allocation(CUdeviceptr address);

/* Reserves `bytes` on the GPU of a device of this process, or returns CUDA_ERROR_OUT_OF_MEMORY. For a context,
 * `contexts` is 1. */
CUresult simgpu_take_memory(uint32_t ordinal, uint64_t bytes, uint32_t contexts);
void simgpu_give_memory(uint32_t ordinal, uint64_t bytes, uint32_t contexts);

/* Frees the remaining allocations of a context, or with NULL those of the memory pool. Under simgpu_objects. */
void simgpu_free_owned(const struct context *context, const struct memory_pool *pool);

/* Allocates on a device, for a pool if one is given. It lives no longer than the context. */
CUresult simgpu_allocate(struct context *context, uint32_t ordinal, struct memory_pool *pool, size_t bytes,
                         CUdeviceptr *address);
CUresult simgpu_free(CUdeviceptr address);

/* Where bytes of device memory are: device_memory.h. */
struct device_place {
    uint32_t gpu;
    uint32_t slot;
    uint64_t offset;
};

/* Finds the place of a range. False if it is not inside one allocation of this process. Past the gate only. */
bool simgpu_find_place(CUdeviceptr address, size_t bytes, struct device_place *place);

#endif
