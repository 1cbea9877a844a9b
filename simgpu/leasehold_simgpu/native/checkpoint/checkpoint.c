/* The six calls of the checkpoint API, as the driver API reference describes them.
 *
 *   RUNNING --Lock--> LOCKED --Checkpoint--> CHECKPOINTED --Restore--> LOCKED --Unlock--> RUNNING
 *
 * Any other call returns ILLEGAL_STATE and changes nothing. A restore that runs out of memory wedges the process
 * (NVIDIA/cuda-checkpoint issue 44, and seen on driver 580.159.04): its state is CHECKPOINTED, but further restores
 * return OPERATING_SYSTEM.
 * The target itself copies its memory and changes its state (restore_thread.h). A lock and an unlock are one store of
 * one word.
 */
#include <time.h>

#include "checkpoint/checkpoint_channel.h"
#include "checkpoint/gpu_pairs.h"
#include "checkpoint/target_marks.h"
#include "host/waits.h"
#include "process/own_process.h"

#define FIRST_DRIVER_WITH_PAIRS 13000
#define DRAIN_POLL_MS 5
#define LIVENESS_INTERVAL_MS 50
#define MULTICAST_POLL_US 20000

static uint64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

static uint32_t state_of(const struct simgpu_process *target) {
    return atomic_load(&target->status) & SIMGPU_STATE_MASK;
}

/* Changes the state and these bits, and keeps the other bits. Does nothing if the target has ended. */
static void move_to(const struct channel *channel, uint32_t state, uint32_t set, uint32_t clear) {
    if (!channel_owns_record(channel))
        return;
    uint32_t status = atomic_load(&channel->target->status) & ~(SIMGPU_STATE_MASK | clear);
    simgpu_set_status(channel->target, status | set | state);
}

static bool is_zero(const void *bytes, size_t count) {
    const unsigned char *byte = bytes;
    while (count > 0 && byte[count - 1] == 0)
        count--;
    return count == 0;
}

EXPORT CUresult cuCheckpointProcessGetState(int pid, CUprocessState *state) {
    struct channel channel;
    if (state == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!channel_open(&channel, SIMGPU_GET_STATE, pid))
        return channel.result;
    CUresult result = channel_close(&channel, CUDA_SUCCESS);
    *state = (CUprocessState)state_of(channel.target);
    return result;
}

EXPORT CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
    struct channel channel;
    if (tid == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (!channel_open(&channel, SIMGPU_GET_RESTORE_THREAD_ID, pid))
        return channel.result;
    *tid = channel.target->restore_tid;
    return channel_close(&channel, CUDA_SUCCESS);
}

/* Closes the gate, waits until no device call and no other work runs, and makes the target LOCKED. Each round closes
 * the gate again, because a target that waited when another controller died may reopen it (gate.c). */
static CUresult drain_and_lock(const struct channel *channel, unsigned timeout_ms) {
    struct simgpu_process *target = channel->target;
    uint64_t start = now_ms(), checked = start;
    for (;;) {
        if (!channel_owns_record(channel))
            return CUDA_ERROR_OPERATING_SYSTEM;
        uint32_t status = atomic_fetch_or(&target->status, SIMGPU_GATE_CLOSED) | SIMGPU_GATE_CLOSED;
        uint32_t in_flight = atomic_load(&target->in_flight);
        if (in_flight == 0 && atomic_load(&target->busy) == 0 &&
            atomic_compare_exchange_strong(&target->status, &status, status | CU_PROCESS_STATE_LOCKED))
            return CUDA_SUCCESS;
        uint64_t now = now_ms();
        if (timeout_ms != 0 && now - start >= timeout_ms)
            return CUDA_ERROR_NOT_READY;
        if (now - checked >= LIVENESS_INTERVAL_MS) {
            if (!channel_target_lives(channel))
                return CUDA_ERROR_OPERATING_SYSTEM;
            checked = now;
        }
        simgpu_wait_word(&target->in_flight, in_flight, DRAIN_POLL_MS);
    }
}

EXPORT CUresult cuCheckpointProcessLock(int pid, const CUcheckpointLockArgs *args) {
    struct channel channel;
    if (args != NULL && !is_zero(&args->reserved0, sizeof *args - offsetof(CUcheckpointLockArgs, reserved0)))
        return CUDA_ERROR_INVALID_VALUE;
    if (!channel_open(&channel, SIMGPU_LOCK, pid))
        return channel.result;
    if (state_of(channel.target) != CU_PROCESS_STATE_RUNNING)
        return channel_close(&channel, CUDA_ERROR_ILLEGAL_STATE);
    CUresult result = lock_obstacle(channel.target);
    if (result != CUDA_SUCCESS)
        return channel_close(&channel, result);
    result = drain_and_lock(&channel, args == NULL ? 0 : args->timeoutMs);
    if (result != CUDA_SUCCESS)
        move_to(&channel, CU_PROCESS_STATE_RUNNING, 0, SIMGPU_GATE_CLOSED);
    return channel_close(&channel, result);
}

/* The time to copy the memory of a process, in microseconds. */
static uint64_t copy_time_us(const struct simgpu_process *target, uint64_t fixed_us, uint64_t bytes_per_s) {
    uint64_t bytes = 0;
    for (uint32_t ordinal = 0; ordinal < target->visible_count; ordinal++)
        bytes += target->allocated_bytes[ordinal];
    return fixed_us + (bytes_per_s == 0 ? 0 : (uint64_t)((double)bytes / (double)bytes_per_s * 1e6));
}

EXPORT CUresult cuCheckpointProcessCheckpoint(int pid, const CUcheckpointCheckpointArgs *args) {
    struct channel channel;
    if (args != NULL && !is_zero(args, sizeof *args))
        return CUDA_ERROR_INVALID_VALUE;
    if (!channel_open(&channel, SIMGPU_CHECKPOINT, pid))
        return channel.result;
    const struct simgpu_host *host = channel.host;
    struct simgpu_process *target = channel.target;
    if (state_of(target) != CU_PROCESS_STATE_LOCKED)
        return channel_close(&channel, CUDA_ERROR_ILLEGAL_STATE);
    while (has_multicast_group(target) && channel_target_lives(&channel))
        simgpu_sleep_us(MULTICAST_POLL_US);
    CUresult result = checkpoint_obstacle(host, target);
    if (result != CUDA_SUCCESS)
        return channel_close(&channel, result);
    uint64_t time_us = copy_time_us(target, host->suspend_fixed_us, host->suspend_bytes_per_s);
    if (!channel.fault.keep_memory)
        return channel_close(&channel, channel_ask(&channel, SIMGPU_EVICT, time_us, NULL));
    result = channel_ask(&channel, SIMGPU_ANSWER, time_us, NULL);
    if (result == CUDA_SUCCESS)
        move_to(&channel, CU_PROCESS_STATE_CHECKPOINTED, 0, 0);
    return channel_close(&channel, result);
}

/* A restore of a process with imported memory wedges it, like a restore that runs out of memory. */
static CUresult restore(const struct channel *channel, const uint8_t new_of[SIMGPU_MAX_GPUS]) {
    const struct simgpu_host *host = channel->host;
    CUresult obstacle = restore_obstacle(channel->target);
    if (obstacle != CUDA_SUCCESS) {
        move_to(channel, CU_PROCESS_STATE_CHECKPOINTED, SIMGPU_WEDGED, 0);
        return obstacle;
    }
    uint64_t time_us = copy_time_us(channel->target, host->restore_fixed_us, host->restore_bytes_per_s);
    return channel_ask(channel, SIMGPU_PLACE, time_us, new_of);
}

EXPORT CUresult cuCheckpointProcessRestore(int pid, const CUcheckpointRestoreArgs *args) {
    struct channel channel;
    if (args != NULL && !is_zero(args->reserved, sizeof args->reserved))
        return CUDA_ERROR_INVALID_VALUE;
    if (!channel_open(&channel, SIMGPU_RESTORE, pid))
        return channel.result;
    const struct simgpu_host *host = channel.host;
    uint32_t count = args == NULL || channel.fault.ignore_gpu_pairs ? 0 : args->gpuPairsCount;
    uint8_t new_of[SIMGPU_MAX_GPUS];
    CUresult result;
    if (state_of(channel.target) != CU_PROCESS_STATE_CHECKPOINTED)
        result = CUDA_ERROR_ILLEGAL_STATE;
    else if (atomic_load(&channel.target->status) & SIMGPU_WEDGED)
        result = CUDA_ERROR_OPERATING_SYSTEM;
    else if (!host->persistence_mode && simgpu_self == NULL)
        result = CUDA_ERROR_NOT_INITIALIZED;
    else if (count != 0 && host->cuda_version < FIRST_DRIVER_WITH_PAIRS)
        result = CUDA_ERROR_NOT_SUPPORTED;
    else
        result = gpu_pairs_read(host, args == NULL ? NULL : args->gpuPairs, count, new_of);
    return channel_close(&channel, result != CUDA_SUCCESS ? result : restore(&channel, new_of));
}

EXPORT CUresult cuCheckpointProcessUnlock(int pid, const CUcheckpointUnlockArgs *args) {
    struct channel channel;
    if (args != NULL && !is_zero(args, sizeof *args))
        return CUDA_ERROR_INVALID_VALUE;
    if (!channel_open(&channel, SIMGPU_UNLOCK, pid))
        return channel.result;
    if (state_of(channel.target) != CU_PROCESS_STATE_LOCKED)
        return channel_close(&channel, CUDA_ERROR_ILLEGAL_STATE);
    move_to(&channel, CU_PROCESS_STATE_RUNNING, 0, SIMGPU_GATE_CLOSED);
    return channel_close(&channel, CUDA_SUCCESS);
}
