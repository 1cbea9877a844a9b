/* The calls of the driver API that allocate memory and say where it is. */
#include "calls/pinned_memory.h"
#include "process/allocations.h"
#include "process/gate.h"
#include "process/own_process.h"

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes) {
    struct context *context;
    CUresult result = simgpu_enter("cuMemAlloc", NEEDS_CONTEXT, &context);
    if (result != CUDA_SUCCESS)
        return result;
    return simgpu_leave(simgpu_allocate(context, context->ordinal, NULL, bytes, address));
}

EXPORT CUresult cuMemFree_v2(CUdeviceptr address) {
    CUresult result = simgpu_enter("cuMemFree", NEEDS_CONTEXT, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    return simgpu_leave(address == 0 ? CUDA_SUCCESS : simgpu_free(address));
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    struct context *context;
    CUresult result = simgpu_enter("cuMemGetInfo", NEEDS_CONTEXT, &context);
    if (result != CUDA_SUCCESS)
        return result;
    struct simgpu_host *host = simgpu_host();
    uint32_t gpu = simgpu_gpu_of(simgpu_self, context->ordinal);
    if (!simgpu_lock())
        return simgpu_leave(CUDA_ERROR_OPERATING_SYSTEM);
    uint64_t total = host->gpus[gpu].memory_bytes, used = simgpu_used_bytes(host, gpu, NULL);
    simgpu_unlock();
    *total_bytes = total;
    *free_bytes = used < total ? total - used : 0;
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address) {
    CUresult result = simgpu_enter("cuMemGetAddressRange", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&simgpu_objects);
    const struct allocation *allocation = simgpu_find_allocation(address);
    if (allocation != NULL && base != NULL)
        *base = allocation->address;
    if (allocation != NULL && bytes != NULL)
        *bytes = allocation->bytes;
    pthread_mutex_unlock(&simgpu_objects);
    return allocation != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* An attribute of an address in device memory or pinned host memory. Other addresses are an error for most. */
static CUresult pointer_attribute(void *data, int attribute, CUdeviceptr address) {
    const struct pinned_memory *pinned = simgpu_find_pinned_memory(address, 1);
    const struct allocation *allocation = pinned != NULL ? NULL : simgpu_find_allocation(address);
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = 0;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(unsigned *)data = pinned != NULL || allocation != NULL;
        return CUDA_SUCCESS;
    default:
        break;
    }
    if (pinned == NULL && (allocation == NULL || attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = pinned != NULL ? pinned->context : allocation->context;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = pinned != NULL ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)data = address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(uint64_t *)data = pinned != NULL ? pinned->id : allocation->id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = (int)(pinned != NULL ? pinned->context->ordinal : allocation->ordinal);
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)data = pinned != NULL ? pinned->address : allocation->address;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)data = pinned != NULL ? pinned->bytes : allocation->bytes;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

EXPORT CUresult cuPointerGetAttribute(void *data, int attribute, CUdeviceptr address) {
    CUresult result = simgpu_enter("cuPointerGetAttribute", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&simgpu_objects);
    result = pointer_attribute(data, attribute, address);
    pthread_mutex_unlock(&simgpu_objects);
    return result;
}

/* Unlike its singular form it succeeds for any address: what does not apply is left as zero by the caller. */
EXPORT CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **data, CUdeviceptr address) {
    CUresult result = simgpu_enter("cuPointerGetAttributes", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&simgpu_objects);
    for (unsigned index = 0; index < count; index++)
        (void)pointer_attribute(data[index], attributes[index], address);
    pthread_mutex_unlock(&simgpu_objects);
    return CUDA_SUCCESS;
}
