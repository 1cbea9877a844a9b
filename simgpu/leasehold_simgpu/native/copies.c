/* Copies and fills. Streams complete work at once and in order, so asynchronous forms equal the synchronous ones. */
#include "driver.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "device_memory.h"
#include "pinned_memory.h"

#define CHUNK_BYTES ((size_t)1 << 20)

/* One end of a copy: device memory, or with `on_device` false memory of the host. */
struct side {
    bool on_device;
    struct device_memory memory;
    uint64_t offset;
    void *address;
};

static CUresult failure(void) {
    return errno == EFAULT ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OPERATING_SYSTEM;
}

/* Must end with device_memory_close() of its memory. */
static CUresult open_side(struct side *side, CUdeviceptr address, size_t bytes) {
    struct device_place place;
    *side = (struct side){.memory.file = -1, .address = (void *)(uintptr_t)address};
    side->on_device = simgpu_find_place(address, bytes, &place);
    if (!side->on_device)
        return CUDA_SUCCESS;
    side->offset = place.offset;
    return device_memory_open(&side->memory, place.gpu, place.slot) ? CUDA_SUCCESS : failure();
}

static bool copy_on_device(const struct side *to, const struct side *from, size_t bytes) {
    void *chunk = malloc(CHUNK_BYTES);
    bool done = chunk != NULL;
    for (size_t at = 0; done && at < bytes; at += CHUNK_BYTES) {
        size_t length = bytes - at < CHUNK_BYTES ? bytes - at : CHUNK_BYTES;
        done = device_memory_read(&from->memory, from->offset + at, chunk, length) &&
               device_memory_write(&to->memory, to->offset + at, chunk, length);
    }
    free(chunk);
    return done;
}

static CUresult move(const struct side *to, const struct side *from, size_t bytes) {
    bool done = true;
    if (to->on_device && from->on_device)
        done = copy_on_device(to, from, bytes);
    else if (to->on_device)
        done = device_memory_write(&to->memory, to->offset, from->address, bytes);
    else if (from->on_device)
        done = device_memory_read(&from->memory, from->offset, to->address, bytes);
    else
        memmove(to->address, from->address, bytes);
    return done ? CUDA_SUCCESS : failure();
}

/* Copies between two sides; each must be device memory of the process if `*_on_device` says so. */
static CUresult copy(const char *call, CUdeviceptr to, bool to_on_device, CUdeviceptr from, bool from_on_device,
                     size_t bytes) {
    CUresult result = simgpu_enter(call, NEEDS_CONTEXT, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (bytes == 0)
        return simgpu_leave(CUDA_SUCCESS);
    if (to == 0 || from == 0)
        return simgpu_leave(CUDA_ERROR_INVALID_VALUE);
    struct side target, source;
    result = open_side(&target, to, bytes);
    if (result != CUDA_SUCCESS)
        return simgpu_leave(result);
    result = open_side(&source, from, bytes);
    if (result == CUDA_SUCCESS) {
        bool wrong = (to_on_device && !target.on_device) || (from_on_device && !source.on_device);
        result = wrong ? CUDA_ERROR_INVALID_VALUE : move(&target, &source, bytes);
        device_memory_close(&source.memory);
    }
    device_memory_close(&target.memory);
    return simgpu_leave(result);
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

/* Writes bytes that lie `at` bytes behind the beginning of a side. */
static bool write_at(const struct side *to, size_t at, const void *from, size_t length) {
    if (to->on_device)
        return device_memory_write(&to->memory, to->offset + at, from, length);
    memcpy((char *)to->address + at, from, length);
    return true;
}

/* Writes `bytes` of a value over and over. The width divides the chunk, and the bytes. */
static CUresult write_pattern(const struct side *to, const void *value, size_t width, size_t bytes) {
    size_t length = bytes < CHUNK_BYTES ? bytes : CHUNK_BYTES;
    char *chunk = malloc(length);
    bool done = chunk != NULL;
    for (size_t at = 0; done && at < length; at += width)
        memcpy(chunk + at, value, width);
    for (size_t at = 0; done && at < bytes; at += length)
        done = write_at(to, at, chunk, bytes - at < length ? bytes - at : length);
    free(chunk);
    return done ? CUDA_SUCCESS : failure();
}

static bool is_pinned(CUdeviceptr to, size_t bytes) {
    pthread_mutex_lock(&simgpu_objects);
    bool pinned = simgpu_find_pinned_memory(to, bytes) != NULL;
    pthread_mutex_unlock(&simgpu_objects);
    return pinned;
}

/* Fills `count` elements of `width` bytes, which the address must be aligned to. */
static CUresult fill(const char *call, CUdeviceptr to, const void *value, size_t width, size_t count) {
    CUresult result = simgpu_enter(call, NEEDS_CONTEXT, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (count == 0)
        return simgpu_leave(CUDA_SUCCESS);
    if (to % width != 0 || count > SIZE_MAX / width)
        return simgpu_leave(CUDA_ERROR_INVALID_VALUE);
    struct side side;
    result = open_side(&side, to, count * width);
    if (result != CUDA_SUCCESS)
        return simgpu_leave(result);
    bool can_be_filled = side.on_device || is_pinned(to, count * width);
    result = can_be_filled ? write_pattern(&side, value, width, count * width) : CUDA_ERROR_INVALID_VALUE;
    device_memory_close(&side.memory);
    return simgpu_leave(result);
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
