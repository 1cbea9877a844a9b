/* Contexts: one primary per device and any others, and each thread's stack of current ones. */
#include "driver.h"

#include <stdlib.h>
#include <string.h>

#define STACK_DEPTH 64

static struct context primary_contexts[SIMGPU_MAX_GPUS];
static _Thread_local struct context *stack[STACK_DEPTH];
static _Thread_local unsigned depth;
static uint64_t next_id = 1;

CUresult simgpu_find_context(CUcontext handle, struct context **context) {
    struct context *found = handle != NULL ? handle : depth > 0 ? stack[depth - 1] : NULL;
    if (found == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!found->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *context = found;
    return CUDA_SUCCESS;
}

/* Creates a context and allocates its memory. Under simgpu_objects. */
static CUresult make_alive(struct context *context, uint32_t ordinal, bool primary) {
    CUresult result = simgpu_take_memory(ordinal, 0, 1);
    if (result != CUDA_SUCCESS)
        return result;
    context->ordinal = ordinal;
    context->primary = primary;
    context->references = 1;
    context->id = next_id++;
    context->alive = true;
    return CUDA_SUCCESS;
}

/* Destroys a context with its work and its allocations. Under simgpu_objects. */
static void end_context(struct context *context) {
    simgpu_free_owned(context, NULL);
    simgpu_give_memory(context->ordinal, 0, 1);
    context->alive = false;
    context->references = 0;
}

/* Passes the gate and finds the device's primary context, with simgpu_objects taken; finish() undoes both. */
static CUresult begin_primary(const char *call, CUdevice device, struct context **context) {
    CUresult result = simgpu_enter(call, NEEDS_GATE, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    const struct simgpu_gpu *gpu = simgpu_device(device);
    if (gpu == NULL)
        return simgpu_leave(CUDA_ERROR_INVALID_DEVICE);
    if (gpu->lost)
        return simgpu_leave(CUDA_ERROR_UNKNOWN);
    *context = &primary_contexts[device];
    pthread_mutex_lock(&simgpu_objects);
    return CUDA_SUCCESS;
}

static CUresult finish(CUresult result) {
    pthread_mutex_unlock(&simgpu_objects);
    return simgpu_leave(result);
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device) {
    struct context *context;
    CUresult result = begin_primary("cuDevicePrimaryCtxRetain", device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (context->alive)
        context->references++;
    else
        result = make_alive(context, (uint32_t)device, true);
    if (result == CUDA_SUCCESS)
        *out = context;
    return finish(result);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    struct context *context;
    CUresult result = begin_primary("cuDevicePrimaryCtxRelease", device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (!context->alive)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else if (--context->references == 0)
        end_context(context);
    return finish(result);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) {
    struct context *context;
    CUresult result = begin_primary("cuDevicePrimaryCtxReset", device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    if (context->alive)
        end_context(context);
    return finish(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned flags) {
    struct context *context;
    CUresult result = begin_primary("cuDevicePrimaryCtxSetFlags", device, &context);
    if (result != CUDA_SUCCESS)
        return result;
    context->flags = flags;
    return finish(CUDA_SUCCESS);
}

EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    CUresult result = simgpu_enter("cuDevicePrimaryCtxGetState", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (simgpu_device(device) == NULL)
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = primary_contexts[device].flags;
    *active = primary_contexts[device].alive;
    return CUDA_SUCCESS;
}

static CUresult create_context(CUcontext *out, unsigned flags, CUdevice device) {
    CUresult result = simgpu_enter("cuCtxCreate", NEEDS_GATE, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL || simgpu_device(device) == NULL)
        return simgpu_leave(out == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE);
    struct context *context = calloc(1, sizeof *context);
    if (context == NULL || depth == STACK_DEPTH) {
        free(context);
        return simgpu_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    pthread_mutex_lock(&simgpu_objects);
    result = make_alive(context, (uint32_t)device, false);
    if (result == CUDA_SUCCESS) {
        context->flags = flags;
        stack[depth++] = context;
        *out = context;
    } else {
        free(context);
    }
    return finish(result);
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device) {
    return create_context(out, flags, device);
}

/* CUDA 13's form: `parameters` requests execution affinity or graphics, which simgpu lacks. */
EXPORT CUresult cuCtxCreate_v4(CUcontext *out, const void *parameters, unsigned flags, CUdevice device) {
    (void)parameters;
    return create_context(out, flags, device);
}

/* The struct is kept: another thread's stack may still refer to it, and must see that it is destroyed. */
EXPORT CUresult cuCtxDestroy_v2(CUcontext context) {
    CUresult result = simgpu_enter("cuCtxDestroy", NEEDS_GATE, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&simgpu_objects);
    if (context == NULL || context->primary || !context->alive)
        return finish(CUDA_ERROR_INVALID_CONTEXT);
    end_context(context);
    if (depth > 0 && stack[depth - 1] == context)
        depth--;
    return finish(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
    CUresult result = simgpu_enter("cuCtxSetCurrent", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (depth > 0)
        depth--;
    if (context != NULL)
        stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    CUresult result = simgpu_enter("cuCtxGetCurrent", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        *context = depth > 0 ? stack[depth - 1] : NULL;
    return result;
}

EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CUresult result = simgpu_enter("cuCtxPushCurrent", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (context == NULL || depth == STACK_DEPTH)
        return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    CUresult result = simgpu_enter("cuCtxPopCurrent", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (context != NULL)
        *context = stack[depth];
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetDevice_v2(CUdevice *device, CUcontext handle) {
    struct context *context;
    CUresult result = simgpu_enter("cuCtxGetDevice", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        result = simgpu_find_context(handle, &context);
    if (result == CUDA_SUCCESS)
        *device = (CUdevice)context->ordinal;
    return result;
}

EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    return cuCtxGetDevice_v2(device, NULL);
}

EXPORT CUresult cuCtxGetFlags(unsigned *flags) {
    struct context *context;
    CUresult result = simgpu_enter("cuCtxGetFlags", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        result = simgpu_find_context(NULL, &context);
    if (result == CUDA_SUCCESS)
        *flags = context->flags;
    return result;
}

EXPORT CUresult cuCtxGetId(CUcontext handle, unsigned long long *id) {
    struct context *context;
    CUresult result = simgpu_enter("cuCtxGetId", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        result = simgpu_find_context(handle, &context);
    if (result == CUDA_SUCCESS)
        *id = context->id;
    return result;
}

EXPORT CUresult cuCtxGetApiVersion(CUcontext handle, unsigned *version) {
    struct context *context;
    CUresult result = simgpu_enter("cuCtxGetApiVersion", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        result = simgpu_find_context(handle, &context);
    if (result == CUDA_SUCCESS)
        *version = 3020;
    return result;
}

/* Work completes when it is submitted, so there is nothing to wait for. */
EXPORT CUresult cuCtxSynchronize(void) {
    CUresult result = simgpu_enter("cuCtxSynchronize", NEEDS_CONTEXT, NULL);
    return result != CUDA_SUCCESS ? result : simgpu_leave(CUDA_SUCCESS);
}

EXPORT CUresult cuCtxSynchronize_v2(CUcontext handle) {
    struct context *context;
    CUresult result = simgpu_enter("cuCtxSynchronize", NEEDS_GATE, NULL);
    return result != CUDA_SUCCESS ? result : simgpu_leave(simgpu_find_context(handle, &context));
}

EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    CUresult result = simgpu_enter("cuCtxGetStreamPriorityRange", NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return CUDA_SUCCESS;
}
