/* Streams and events. Work completes when it is submitted, so a stream is only a name and an event a time stamp. */
#include "driver.h"

#include <stdlib.h>
#include <time.h>

struct stream {
    struct context *context;
    unsigned flags;
    int priority;
    uint64_t id;
};

struct event {
    struct context *context;
    unsigned flags;
    uint64_t recorded_ns; /* 0: never */
};

static _Atomic uint64_t next_stream_id = 3; /* 0, 1 and 2 are the default, legacy and per-thread streams */

/* The streams that are no object but a small number: NULL, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD. */
static bool is_builtin(CUstream stream) {
    return (uintptr_t)stream <= 2;
}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* A call without work of its own, which only has to pass the gate. */
static CUresult nothing_to_do(const char *call) {
    CUresult result = simgpu_enter(call, NEEDS_CONTEXT, NULL);
    return result != CUDA_SUCCESS ? result : simgpu_leave(CUDA_SUCCESS);
}

static CUresult create_stream(const char *call, CUstream *out, unsigned flags, int priority) {
    struct context *context;
    CUresult result = simgpu_enter(call, NEEDS_CONTEXT, &context);
    if (result != CUDA_SUCCESS)
        return result;
    struct stream *stream = malloc(sizeof *stream);
    if (stream == NULL)
        return simgpu_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *stream = (struct stream){context, flags, priority, atomic_fetch_add(&next_stream_id, 1)};
    *out = stream;
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    return create_stream("cuStreamCreate", stream, flags, 0);
}

EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    return create_stream("cuStreamCreateWithPriority", stream, flags, priority);
}

EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
    CUresult result = simgpu_enter("cuStreamDestroy", NEEDS_GATE, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (is_builtin(stream))
        return simgpu_leave(CUDA_ERROR_INVALID_HANDLE);
    free(stream);
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamSynchronize(CUstream stream) {
    (void)stream;
    return nothing_to_do("cuStreamSynchronize");
}

EXPORT CUresult cuStreamQuery(CUstream stream) {
    (void)stream;
    return nothing_to_do("cuStreamQuery");
}

EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
    (void)stream;
    (void)event;
    (void)flags;
    return nothing_to_do("cuStreamWaitEvent");
}

EXPORT CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *user_data) {
    (void)stream;
    CUresult result = simgpu_enter("cuLaunchHostFunc", NEEDS_CONTEXT, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    function(user_data);
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuStreamGetFlags(CUstream stream, unsigned *flags) {
    CUresult result = simgpu_enter("cuStreamGetFlags", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        *flags = is_builtin(stream) ? 0 : stream->flags;
    return result;
}

EXPORT CUresult cuStreamGetPriority(CUstream stream, int *priority) {
    CUresult result = simgpu_enter("cuStreamGetPriority", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        *priority = is_builtin(stream) ? 0 : stream->priority;
    return result;
}

EXPORT CUresult cuStreamGetId(CUstream stream, unsigned long long *id) {
    CUresult result = simgpu_enter("cuStreamGetId", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        *id = is_builtin(stream) ? (uintptr_t)stream : stream->id;
    return result;
}

EXPORT CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) {
    CUresult result = simgpu_enter("cuStreamGetCtx", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    return simgpu_find_context(is_builtin(stream) ? NULL : stream->context, context);
}

/* Version 2 also names the green context of the stream: there are none. */
EXPORT CUresult cuStreamGetCtx_v2(CUstream stream, CUcontext *context, void **green_context) {
    if (green_context != NULL)
        *green_context = NULL;
    return cuStreamGetCtx(stream, context);
}

EXPORT CUresult cuStreamGetDevice(CUstream stream, CUdevice *device) {
    struct context *context;
    CUresult result = cuStreamGetCtx(stream, &context);
    if (result == CUDA_SUCCESS)
        *device = (CUdevice)context->ordinal;
    return result;
}

EXPORT CUresult cuStreamIsCapturing(CUstream stream, int *status) {
    (void)stream;
    CUresult result = simgpu_enter("cuStreamIsCapturing", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        *status = 0;
    return result;
}

EXPORT CUresult cuEventCreate(CUevent *out, unsigned flags) {
    struct context *context;
    CUresult result = simgpu_enter("cuEventCreate", NEEDS_CONTEXT, &context);
    if (result != CUDA_SUCCESS)
        return result;
    struct event *event = malloc(sizeof *event);
    if (event == NULL)
        return simgpu_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *event = (struct event){context, flags, 0};
    *out = event;
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuEventDestroy_v2(CUevent event) {
    CUresult result = simgpu_enter("cuEventDestroy", NEEDS_GATE, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    free(event);
    return simgpu_leave(event == NULL ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS);
}

EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
    (void)stream;
    CUresult result = simgpu_enter("cuEventRecord", NEEDS_CONTEXT, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (event == NULL)
        return simgpu_leave(CUDA_ERROR_INVALID_HANDLE);
    event->recorded_ns = now_ns();
    return simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags) {
    (void)flags;
    return cuEventRecord(event, stream);
}

EXPORT CUresult cuEventQuery(CUevent event) {
    (void)event;
    return nothing_to_do("cuEventQuery");
}

EXPORT CUresult cuEventSynchronize(CUevent event) {
    (void)event;
    return nothing_to_do("cuEventSynchronize");
}

EXPORT CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end) {
    CUresult result = simgpu_enter("cuEventElapsedTime", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (start == NULL || end == NULL || start->recorded_ns == 0 || end->recorded_ns == 0 ||
        ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING))
        return CUDA_ERROR_INVALID_HANDLE;
    *milliseconds = (float)((double)(int64_t)(end->recorded_ns - start->recorded_ns) / 1e6);
    return CUDA_SUCCESS;
}
