#include "pinned_memory.h"

#include <stdlib.h>

#define PAGE_BYTES 4096

struct pinned {
    CUdeviceptr address;
    size_t bytes;
    uint64_t id;
    struct context *context;
    struct pinned *next;
};

static struct pinned *all;
static uint64_t next_id = 1;

static struct pinned *find(CUdeviceptr address) {
    struct pinned *pinned = all;
    while (pinned != NULL && address - pinned->address >= pinned->bytes)
        pinned = pinned->next;
    return pinned;
}

bool simgpu_is_pinned_memory(CUdeviceptr address, size_t bytes) {
    const struct pinned *pinned = find(address);
    return pinned != NULL && bytes <= pinned->bytes - (address - pinned->address);
}

static CUresult allocate(const char *call, void **address, size_t bytes) {
    struct context *context;
    CUresult result = simgpu_enter(call, NEEDS_CONTEXT, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (address == NULL || bytes == 0)
        return simgpu_leave(CUDA_ERROR_INVALID_VALUE);
    struct pinned *pinned = malloc(sizeof *pinned);
    if (pinned == NULL || posix_memalign(address, PAGE_BYTES, bytes) != 0) {
        free(pinned);
        return simgpu_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    pthread_mutex_lock(&simgpu_objects);
    *pinned = (struct pinned){(CUdeviceptr)(uintptr_t)*address, bytes, next_id++, context, all};
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
    for (struct pinned **link = &all; *link != NULL; link = &(*link)->next) {
        struct pinned *pinned = *link;
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

CUresult simgpu_pinned_attribute(void *data, int attribute, CUdeviceptr address) {
    const struct pinned *pinned = find(address);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = pinned->context;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)data = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(uint64_t *)data = pinned->id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = (int)pinned->context->ordinal;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = pinned->address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = pinned->bytes;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned *)data = 1;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}
