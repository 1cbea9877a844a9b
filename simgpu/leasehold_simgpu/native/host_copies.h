/* Device memory that a checkpoint has copied into private memory of the process. */
#ifndef SIMGPU_HOST_COPIES_H
#define SIMGPU_HOST_COPIES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One range of written bytes. Bytes that were never written are not copied, and take no memory on either side. */
struct host_copy {
    uint64_t offset; /* physical: in the memory slot */
    size_t bytes;
    void *memory;
    struct host_copy *next;
};

/* Adds copies of the written bytes from `offset` on. False: see errno, which is ENOMEM if the host has no memory. */
bool host_copies_make(struct host_copy **copies, uint32_t gpu, uint32_t slot, uint64_t offset, uint64_t bytes);

/* Writes the copies to the same offsets of a slot, and keeps them. False if the GPU cannot be written. */
bool host_copies_write(const struct host_copy *copies, uint32_t gpu, uint32_t slot);

void host_copies_drop(struct host_copy **copies);

#endif
