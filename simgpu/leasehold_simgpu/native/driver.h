/* Shared declarations of the simulated libcuda.so.1: one process's side of the driver. */
#ifndef SIMGPU_DRIVER_H
#define SIMGPU_DRIVER_H

#include <pthread.h>
#include <stdbool.h>

#include "driver_types.h"
#include "state.h"

struct context {
    uint32_t ordinal;
    unsigned flags;
    unsigned references; /* of a primary context; 1 for any other */
    bool alive;
    bool primary;
    uint64_t id;
};

/* The record of this process on the host; NULL before cuInit, and in a child forked after it. */
extern struct simgpu_process *simgpu_self;

/* Its id. After a restore from an image, the record may belong to another process. */
extern uint64_t simgpu_record_id;

/* Guards the objects of this process: contexts, allocations, pools. Taken before simgpu_lock(). */
extern pthread_mutex_t simgpu_objects;

enum call_kind {
    NEEDS_NOTHING,  /* answers at any time */
    NEEDS_DRIVER,   /* needs cuInit; does not touch a GPU, so it answers while the process is locked too */
    NEEDS_GATE,     /* needs cuInit, and waits while the process is not RUNNING */
    NEEDS_CONTEXT,  /* as NEEDS_GATE, and a living current context on a GPU that is not lost */
};

/* Starts a driver call: applies its faults, waits at the gate and finds the current context (`context` may be NULL).
 * Every NEEDS_GATE or NEEDS_CONTEXT call that began with CUDA_SUCCESS must end with simgpu_leave(). */
CUresult simgpu_enter(const char *call, enum call_kind kind, struct context **context);

/* Ends a call that passed the gate, so that a lock may proceed. Returns `result`. */
CUresult simgpu_leave(CUresult result);

/* The present GPU of a CUDA device, or NULL if the device does not exist. */
struct simgpu_gpu *simgpu_device(CUdevice device);

/* The context of this handle, or of the calling thread when NULL. */
CUresult simgpu_find_context(CUcontext handle, struct context **context);

/* Reserves `bytes` on the GPU of a device of this process, or returns CUDA_ERROR_OUT_OF_MEMORY. For a context,
 * `contexts` is 1. */
CUresult simgpu_take_memory(uint32_t ordinal, uint64_t bytes, uint32_t contexts);
void simgpu_give_memory(uint32_t ordinal, uint64_t bytes, uint32_t contexts);

/* Frees the remaining allocations of a context, or with NULL those of the memory pool. Under simgpu_objects. */
void simgpu_free_owned(const struct context *context, const struct memory_pool *pool);

/* Allocates on a device, for a pool if one is given. It lives no longer than the context. */
CUresult simgpu_allocate(struct context *context, uint32_t ordinal, struct memory_pool *pool, size_t bytes,
                         CUdeviceptr *address);
CUresult simgpu_free(CUdeviceptr address);

/* Books memory that went into or out of a pool. */
void simgpu_pool_changed(struct memory_pool *pool, int64_t bytes);

/* Where bytes of device memory are: device_memory.h. */
struct device_place {
    uint32_t gpu;
    uint32_t slot;
    uint64_t offset;
};

/* Finds the place of a range. False if it is not inside one allocation of this process. Past the gate only. */
bool simgpu_find_place(CUdeviceptr address, size_t bytes, struct device_place *place);

#endif
