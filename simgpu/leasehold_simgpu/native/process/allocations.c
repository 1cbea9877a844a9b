#include "process/allocations.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "memory/device_memory.h"
#include "memory/memory_slots.h"
#include "process/own_process.h"

struct allocation *simgpu_allocations;

uint64_t simgpu_next_buffer_id(void) {
    static uint64_t last;
    return ++last;
}

CUresult simgpu_take_memory(uint32_t ordinal, uint64_t bytes, uint32_t contexts) {
    struct simgpu_host *host = simgpu_host();
    if (!simgpu_lock())
        return CUDA_ERROR_OPERATING_SYSTEM;
    uint32_t gpu = simgpu_gpu_of(simgpu_self, ordinal);
    uint64_t used = simgpu_used_bytes(host, gpu, NULL);
    uint64_t wanted = bytes + contexts * host->context_bytes;
    uint64_t total = host->gpus[gpu].memory_bytes;
    bool fits = used <= total && wanted <= total - used;
    if (fits) {
        if (bytes != 0 && simgpu_self->memory_slots[ordinal] == 0)
            memory_slots_take(host, simgpu_self, ordinal, gpu);
        simgpu_self->allocated_bytes[ordinal] += bytes;
        simgpu_self->contexts[ordinal] += contexts;
    }
    simgpu_unlock();
    return fits ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void simgpu_give_memory(uint32_t ordinal, uint64_t bytes, uint32_t contexts) {
    while (!simgpu_lock())
        ; /* memory is always given back */
    simgpu_self->allocated_bytes[ordinal] -= bytes;
    simgpu_self->contexts[ordinal] -= contexts;
    simgpu_unlock();
}

struct allocation *simgpu_find_allocation(CUdeviceptr address) {
    struct allocation *allocation = simgpu_allocations;
    while (allocation != NULL && address - allocation->address >= allocation->bytes)
        allocation = allocation->next;
    return allocation;
}

/* Books memory that went into a pool, or with a negative number out of it. */
static void pool_changed(struct memory_pool *pool, int64_t bytes) {
    pool->used += (uint64_t)bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
}

static void release(struct allocation *allocation) {
    munmap((void *)(uintptr_t)allocation->address, allocation->bytes);
    (void)device_memory_erase(simgpu_gpu_of(simgpu_self, allocation->ordinal),
                              simgpu_self->memory_slots[allocation->ordinal], allocation->offset, allocation->bytes);
    host_copies_drop(&allocation->copies);
    simgpu_give_memory(allocation->ordinal, allocation->bytes, 0);
    if (allocation->pool != NULL)
        pool_changed(allocation->pool, -(int64_t)allocation->bytes);
    free(allocation);
}

static uint64_t whole_pages(uint64_t bytes) {
    return (bytes + DEVICE_MEMORY_PAGE_BYTES - 1) / DEVICE_MEMORY_PAGE_BYTES * DEVICE_MEMORY_PAGE_BYTES;
}

/* Puts an allocation into the first gap of its device that holds it. Under simgpu_objects. */
static void insert(struct allocation *allocation) {
    struct allocation **link = &simgpu_allocations;
    while (*link != NULL && (*link)->ordinal < allocation->ordinal)
        link = &(*link)->next;
    uint64_t offset = 0, bytes = whole_pages(allocation->bytes);
    for (; *link != NULL && (*link)->ordinal == allocation->ordinal; link = &(*link)->next) {
        if ((*link)->offset - offset >= bytes)
            break;
        offset = (*link)->offset + whole_pages((*link)->bytes);
    }
    allocation->offset = offset;
    allocation->next = *link;
    *link = allocation;
}

CUresult simgpu_allocate(struct context *context, uint32_t ordinal, struct memory_pool *pool, size_t bytes,
                         CUdeviceptr *address) {
    if (bytes == 0 || address == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = simgpu_take_memory(ordinal, bytes, 0);
    if (result != CUDA_SUCCESS)
        return result;
    struct allocation *allocation = malloc(sizeof *allocation);
    void *reserved = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (allocation == NULL || reserved == MAP_FAILED) {
        if (reserved != MAP_FAILED)
            munmap(reserved, bytes);
        free(allocation);
        simgpu_give_memory(ordinal, bytes, 0);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_lock(&simgpu_objects);
    *allocation = (struct allocation){
        .address = (CUdeviceptr)(uintptr_t)reserved,
        .bytes = bytes,
        .id = simgpu_next_buffer_id(),
        .ordinal = ordinal,
        .context = context,
        .pool = pool,
    };
    insert(allocation);
    if (pool != NULL)
        pool_changed(pool, (int64_t)bytes);
    pthread_mutex_unlock(&simgpu_objects);
    *address = allocation->address;
    return CUDA_SUCCESS;
}

CUresult simgpu_free(CUdeviceptr address) {
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&simgpu_objects);
    for (struct allocation **link = &simgpu_allocations; *link != NULL; link = &(*link)->next) {
        struct allocation *allocation = *link;
        if (allocation->address != address)
            continue;
        *link = allocation->next;
        release(allocation);
        result = CUDA_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&simgpu_objects);
    return result;
}

void simgpu_free_owned(const struct context *context, const struct memory_pool *pool) {
    struct allocation **link = &simgpu_allocations;
    while (*link != NULL) {
        struct allocation *allocation = *link;
        if (pool != NULL ? allocation->pool == pool : allocation->context == context) {
            *link = allocation->next;
            release(allocation);
        } else {
            link = &allocation->next;
        }
    }
}

bool simgpu_find_place(CUdeviceptr address, size_t bytes, struct device_place *place) {
    pthread_mutex_lock(&simgpu_objects);
    const struct allocation *allocation = simgpu_find_allocation(address);
    bool inside = allocation != NULL && bytes <= allocation->bytes - (address - allocation->address);
    if (inside) {
        place->gpu = simgpu_gpu_of(simgpu_self, allocation->ordinal);
        place->slot = simgpu_self->memory_slots[allocation->ordinal];
        place->offset = allocation->offset + (address - allocation->address);
    }
    pthread_mutex_unlock(&simgpu_objects);
    return inside;
}

