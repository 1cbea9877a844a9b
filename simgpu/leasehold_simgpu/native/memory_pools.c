/* Stream-ordered allocation. A pool counts its allocations. Freed memory returns to the GPU at once, independent of the
 * release threshold. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

struct memory_pool {
    uint32_t ordinal;
    uint64_t settings[5]; /* by attribute: three reuse policies and the release threshold */
    uint64_t used;
    uint64_t used_high;
};

static struct memory_pool default_pools[SIMGPU_MAX_GPUS];
static struct memory_pool *current_pools[SIMGPU_MAX_GPUS];

static void make_pool(struct memory_pool *pool, uint32_t ordinal) {
    memset(pool, 0, sizeof *pool);
    pool->ordinal = ordinal;
    pool->settings[CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] = 1;
    pool->settings[CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC] = 1;
    pool->settings[CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES] = 1;
}

static struct memory_pool *default_pool(uint32_t ordinal) {
    struct memory_pool *pool = &default_pools[ordinal];
    if (pool->settings[CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] == 0 && pool->used_high == 0)
        make_pool(pool, ordinal);
    return pool;
}

static struct memory_pool *current_pool(uint32_t ordinal) {
    return current_pools[ordinal] != NULL ? current_pools[ordinal] : default_pool(ordinal);
}

void simgpu_pool_changed(struct memory_pool *pool, int64_t bytes) {
    pool->used += (uint64_t)bytes;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
}

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device) {
    CUresult result = simgpu_enter("cuDeviceGetDefaultMemPool", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS && simgpu_device(device) == NULL)
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS)
        *pool = default_pool((uint32_t)device);
    return result;
}

EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device) {
    CUresult result = simgpu_enter("cuDeviceGetMemPool", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS && simgpu_device(device) == NULL)
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS)
        *pool = current_pool((uint32_t)device);
    return result;
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool) {
    CUresult result = simgpu_enter("cuDeviceSetMemPool", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (simgpu_device(device) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    if (pool == NULL || pool->ordinal != (uint32_t)device)
        return CUDA_ERROR_INVALID_VALUE;
    current_pools[device] = pool;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties) {
    CUresult result = simgpu_enter("cuMemPoolCreate", NEEDS_GATE, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL || properties == NULL)
        return simgpu_leave(CUDA_ERROR_INVALID_VALUE);
    if (properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties->handleTypes != 0)
        return simgpu_leave(CUDA_ERROR_NOT_SUPPORTED);
    if (simgpu_device(properties->location.id) == NULL)
        return simgpu_leave(CUDA_ERROR_INVALID_DEVICE);
    struct memory_pool *pool = malloc(sizeof *pool);
    if (pool == NULL)
        return simgpu_leave(CUDA_ERROR_OUT_OF_MEMORY);
    make_pool(pool, (uint32_t)properties->location.id);
    *out = pool;
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool) {
    CUresult result = simgpu_enter("cuMemPoolDestroy", NEEDS_GATE, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (pool == NULL || pool == &default_pools[pool->ordinal])
        return simgpu_leave(CUDA_ERROR_INVALID_VALUE);
    pthread_mutex_lock(&simgpu_objects);
    simgpu_free_owned(NULL, pool);
    if (current_pools[pool->ordinal] == pool)
        current_pools[pool->ordinal] = NULL;
    free(pool);
    pthread_mutex_unlock(&simgpu_objects);
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t bytes_to_keep) {
    (void)pool;
    (void)bytes_to_keep;
    CUresult result = simgpu_enter("cuMemPoolTrimTo", NEEDS_GATE, NULL);
    return result != CUDA_SUCCESS ? result : simgpu_leave(CUDA_SUCCESS);
}

/* A pool is always accessible to its own device, and there are no peers. */
EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const void *descriptors, size_t count) {
    (void)pool;
    (void)descriptors;
    (void)count;
    return simgpu_enter("cuMemPoolSetAccess", NEEDS_DRIVER, NULL);
}

EXPORT CUresult cuMemPoolGetAccess(int *flags, CUmemoryPool pool, const CUmemLocation *location) {
    CUresult result = simgpu_enter("cuMemPoolGetAccess", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    bool own = location->type == CU_MEM_LOCATION_TYPE_DEVICE && location->id == (int)pool->ordinal;
    *flags = own ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, int attribute, void *value) {
    CUresult result = simgpu_enter("cuMemPoolSetAttribute", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (attribute >= CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES &&
        attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
        pool->settings[attribute] = (uint64_t) * (int *)value;
    else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        pool->settings[attribute] = *(uint64_t *)value;
    else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH || attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
        pool->used_high = pool->used;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, int attribute, void *value) {
    CUresult result = simgpu_enter("cuMemPoolGetAttribute", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC:
    case CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES:
        *(int *)value = (int)pool->settings[attribute];
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        *(uint64_t *)value = pool->settings[attribute];
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        *(uint64_t *)value = pool->used;
        return CUDA_SUCCESS;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        *(uint64_t *)value = pool->used_high;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* Unlike cuMemAlloc, a pool accepts 0 bytes and returns the address 0. */
static CUresult allocate(struct context *context, struct memory_pool *pool, size_t bytes, CUdeviceptr *address) {
    if (bytes > 0 || address == NULL)
        return simgpu_allocate(context, pool->ordinal, pool, bytes, address);
    *address = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t bytes, CUmemoryPool pool, CUstream stream) {
    (void)stream;
    struct context *context;
    CUresult result = simgpu_enter("cuMemAllocFromPoolAsync", NEEDS_CONTEXT, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (pool == NULL)
        return simgpu_leave(CUDA_ERROR_INVALID_VALUE);
    return simgpu_leave(allocate(context, pool, bytes, address));
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *address, size_t bytes, CUstream stream) {
    (void)stream;
    struct context *context;
    CUresult result = simgpu_enter("cuMemAllocAsync", NEEDS_CONTEXT, &context);
    if (result != CUDA_SUCCESS)
        return result;
    return simgpu_leave(allocate(context, current_pool(context->ordinal), bytes, address));
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    (void)stream;
    CUresult result = simgpu_enter("cuMemFreeAsync", NEEDS_CONTEXT, NULL);
    return result != CUDA_SUCCESS ? result : simgpu_leave(address == 0 ? CUDA_SUCCESS : simgpu_free(address));
}
