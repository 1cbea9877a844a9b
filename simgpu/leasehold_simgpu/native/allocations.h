/* The device memory that this process has allocated.
 *
 * An allocation reserves a range of virtual addresses, which nothing can read or write. Its bytes are at an offset in
 * the memory slot of the process on a GPU. The address does not change when the process is moved. The bytes are on
 * the GPU while the process is resident, and otherwise in `copies`.
 */
#ifndef SIMGPU_ALLOCATIONS_H
#define SIMGPU_ALLOCATIONS_H

#include "driver.h"
#include "host_copies.h"

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

#endif
