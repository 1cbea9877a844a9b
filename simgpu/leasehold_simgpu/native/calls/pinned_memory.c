#include "calls/pinned_memory.h"

#include <stdlib.h>

#include "process/allocations.h"
#include "process/gate.h"
#include "process/own_process.h"

#define PAGE_BYTES 4096

static struct pinned_memory *all;

const struct pinned_memory *simgpu_find_pinned_memory(CUdeviceptr address, size_t bytes) {
    const struct pinned_memory *pinned = all;
    while (pinned != NULL && address - pinned->address >= pinned->bytes)
        pinned = pinned->next;
    return pinned != NULL && bytes <= pinned->bytes - (address - pinned->address) ? pinned : NULL;
}

static CUresult allocate(const char *call, void **address, size_t bytes) {
    struct context *context;
    CUresult result = simgpu_enter(call, NEEDS_CONTEXT, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (address == NULL || bytes == 0)
        return simgpu_leave(CUDA_ERROR_INVALID_VALUE);
    struct pinned_memory *pinned = malloc(sizeof *pinned);
    if (pinned == NULL || posix_memalign(address, PAGE_BYTES, bytes) != 0) {
        free(pinned);
        return simgpu_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    pthread_mutex_lock(&simgpu_objects);
    uint64_t id = simgpu_next_buffer_id();
    *pinned = (struct pinned_memory){(CUdeviceptr)(uintptr_t)*address, bytes, id, context, all};
    all = pinned;
    pthread_mutex_unlock(&simgpu_objects);
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemAllocHost_v2(void **address, size_t bytes) {
    return allocate("cuMemAllocHost", address, bytes);
}

EXPORT CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    (void)flags;
    return allocate("cuMemHostAlloc", address, bytes);
}

EXPORT CUresult cuMemFreeHost(void *address) {
    CUresult result = simgpu_enter("cuMemFreeHost", NEEDS_CONTEXT, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&simgpu_objects);
    for (struct pinned_memory **link = &all; *link != NULL; link = &(*link)->next) {
        struct pinned_memory *pinned = *link;
        if (pinned->address != (CUdeviceptr)(uintptr_t)address)
            continue;
        *link = pinned->next;
        free(pinned);
        free(address);
        result = CUDA_SUCCESS;
        break;
    }
    pthread_mutex_unlock(&simgpu_objects);
    return simgpu_leave(result);
}
