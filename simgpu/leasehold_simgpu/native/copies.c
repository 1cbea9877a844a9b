/* Copies and fills. Streams run in order and at once, so the asynchronous forms are the synchronous ones. */
#include "driver.h"

#include <string.h>

static void *host(CUdeviceptr address) {
    return (void *)(uintptr_t)address;
}

/* Copies between two sides; each must be device memory of the process if `*_on_device` says so. */
static CUresult copy(const char *call, CUdeviceptr to, bool to_on_device, CUdeviceptr from, bool from_on_device,
                     size_t bytes) {
    CUresult result = simgpu_enter(call, NEEDS_CONTEXT, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (bytes == 0)
        return simgpu_leave(CUDA_SUCCESS);
    if ((to_on_device && !simgpu_is_device_memory(to, bytes)) ||
        (from_on_device && !simgpu_is_device_memory(from, bytes)) || to == 0 || from == 0)
        return simgpu_leave(CUDA_ERROR_INVALID_VALUE);
    memmove(host(to), host(from), bytes);
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes) {
    return copy("cuMemcpyHtoD", to, true, (CUdeviceptr)(uintptr_t)from, false, bytes);
}

EXPORT CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes) {
    return copy("cuMemcpyDtoH", (CUdeviceptr)(uintptr_t)to, false, from, true, bytes);
}

EXPORT CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy("cuMemcpyDtoD", to, true, from, true, bytes);
}

EXPORT CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy("cuMemcpy", to, false, from, false, bytes);
}

EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream stream) {
    (void)stream;
    return copy("cuMemcpyHtoDAsync", to, true, (CUdeviceptr)(uintptr_t)from, false, bytes);
}

EXPORT CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream) {
    (void)stream;
    return copy("cuMemcpyDtoHAsync", (CUdeviceptr)(uintptr_t)to, false, from, true, bytes);
}

EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    (void)stream;
    return copy("cuMemcpyDtoDAsync", to, true, from, true, bytes);
}

EXPORT CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    (void)stream;
    return copy("cuMemcpyAsync", to, false, from, false, bytes);
}

/* Fills `count` elements of `width` bytes, which the address must be aligned to. */
static CUresult fill(const char *call, CUdeviceptr to, const void *value, size_t width, size_t count) {
    CUresult result = simgpu_enter(call, NEEDS_CONTEXT, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (count == 0)
        return simgpu_leave(CUDA_SUCCESS);
    if (to % width != 0 || count > SIZE_MAX / width || !simgpu_is_device_memory(to, count * width))
        return simgpu_leave(CUDA_ERROR_INVALID_VALUE);
    unsigned char *bytes = host(to);
    for (size_t index = 0; index < count; index++)
        memcpy(bytes + index * width, value, width);
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) {
    return fill("cuMemsetD8", to, &value, sizeof value, count);
}

EXPORT CUresult cuMemsetD16_v2(CUdeviceptr to, unsigned short value, size_t count) {
    return fill("cuMemsetD16", to, &value, sizeof value, count);
}

EXPORT CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned int value, size_t count) {
    return fill("cuMemsetD32", to, &value, sizeof value, count);
}

EXPORT CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    (void)stream;
    return fill("cuMemsetD8Async", to, &value, sizeof value, count);
}

EXPORT CUresult cuMemsetD16Async(CUdeviceptr to, unsigned short value, size_t count, CUstream stream) {
    (void)stream;
    return fill("cuMemsetD16Async", to, &value, sizeof value, count);
}

EXPORT CUresult cuMemsetD32Async(CUdeviceptr to, unsigned int value, size_t count, CUstream stream) {
    (void)stream;
    return fill("cuMemsetD32Async", to, &value, sizeof value, count);
}
