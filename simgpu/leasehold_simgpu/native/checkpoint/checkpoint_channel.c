/* The real driver talks to a thread of the target through /proc (NVIDIA/cuda-checkpoint issue 41). The consequences
 * are simulated: a thread id names its process, one call at a time is served, a target that is stopped or frozen
 * answers no call, and the death of a target ends a call with CUDA_ERROR_OPERATING_SYSTEM.
 */
#include "checkpoint/checkpoint_channel.h"

#include <string.h>
#include <unistd.h>

#include "checkpoint/target_marks.h"
#include "host/process_table.h"
#include "host/waits.h"
#include "process/delayed_death.h"
#include "process/request_pipe.h"

#define FIRST_DRIVER_WITH_API 12080
#define POLL_US 2000
#define LIVENESS_INTERVAL_MS 50u

/* The names that faults are set on. */
static const char *const call_names[SIMGPU_CHECKPOINT_CALLS] = {
    [SIMGPU_GET_STATE] = "cuCheckpointProcessGetState",
    [SIMGPU_GET_RESTORE_THREAD_ID] = "cuCheckpointProcessGetRestoreThreadId",
    [SIMGPU_LOCK] = "cuCheckpointProcessLock",
    [SIMGPU_CHECKPOINT] = "cuCheckpointProcessCheckpoint",
    [SIMGPU_RESTORE] = "cuCheckpointProcessRestore",
    [SIMGPU_UNLOCK] = "cuCheckpointProcessUnlock",
};

bool channel_target_lives(const struct channel *channel) {
    return process_start_time(channel->pid) == channel->start_time;
}

bool channel_owns_record(const struct channel *channel) {
    const struct simgpu_process *record = channel->target;
    return record->pid == channel->pid && record->start_time == channel->start_time;
}

/* The record of a process, whose start time is updated: a process restored from an image has a new start time. Under
 * the lock. */
static struct simgpu_process *find_record(const struct channel *channel) {
    for (int slot = 0; slot < SIMGPU_MAX_PROCESSES; slot++) {
        struct simgpu_process *record = &channel->host->processes[slot];
        if (record->pid == channel->pid && simgpu_record_is_live(record)) {
            record->start_time = channel->start_time;
            return record;
        }
    }
    return NULL;
}

/* OPERATING_SYSTEM for a pid that no process has, and without permission. NOT_INITIALIZED for a process without CUDA, a
 * zombie and a kernel thread. Seen on driver 580.159.04. The id of the restore thread needs no permission, as every user
 * can read the names of threads. */
static CUresult find_target(struct channel *channel, enum simgpu_checkpoint_call call, int pid) {
    channel->pid = process_of_thread(pid);
    if (channel->pid == 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    channel->start_time = process_start_time(channel->pid);
    if (channel->start_time == 0)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!simgpu_lock())
        return CUDA_ERROR_OPERATING_SYSTEM;
    channel->target = find_record(channel);
    simgpu_unlock();
    if (channel->target == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    bool permitted = call == SIMGPU_GET_RESTORE_THREAD_ID || request_pipe_permits(channel->target);
    return permitted ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* Takes the channel, unless another live controller holds it or the request of a dead controller is not yet served. */
static bool try_acquire(struct channel *channel) {
    struct simgpu_process *target = channel->target;
    if (!simgpu_lock()) {
        channel->result = CUDA_ERROR_OPERATING_SYSTEM;
        return false;
    }
    bool held = atomic_load(&target->request) != SIMGPU_NO_REQUEST ||
                (target->channel_pid != 0 && process_start_time(target->channel_pid) == target->channel_start_time);
    if (!held && channel_owns_record(channel)) {
        target->channel_start_time = process_start_time(getpid());
        target->channel_pid = getpid();
    }
    simgpu_unlock();
    if (atomic_load(&target->request) != SIMGPU_NO_REQUEST)
        simgpu_wake_word(&target->request); /* the controller may have died between its request and the wake-up */
    return !held && target->channel_pid == getpid();
}

static void release(struct channel *channel) {
    while (!simgpu_lock())
        ; /* or nobody else could call the target */
    if (channel_owns_record(channel))
        channel->target->channel_pid = 0;
    simgpu_unlock();
}

/* Waits until no peer blocks the target, and it serves no other call. False if it dies first, or the lock is not
 * available. */
static bool acquire(struct channel *channel) {
    while (peer_is_suspended(channel->host, channel->target) || !try_acquire(channel)) {
        simgpu_sleep_us(POLL_US);
        if (channel->result != CUDA_SUCCESS || !channel_target_lives(channel) || simgpu_is_doomed(channel->target))
            return false;
    }
    return true;
}

bool channel_open(struct channel *channel, enum simgpu_checkpoint_call call, int pid) {
    channel->host = simgpu_host();
    if (channel->host == NULL)
        channel->result = CUDA_ERROR_NO_DEVICE;
    else if (channel->host->cuda_version < FIRST_DRIVER_WITH_API)
        channel->result = CUDA_ERROR_NOT_SUPPORTED;
    else
        channel->result = find_target(channel, call, pid);
    if (channel->result != CUDA_SUCCESS)
        return false;
    atomic_fetch_add(&channel->target->calls[call], 1);
    if (!acquire(channel)) {
        channel->result = CUDA_ERROR_OPERATING_SYSTEM;
        return false;
    }
    channel->fault = simgpu_no_fault();
    channel->result = channel_ask(channel, SIMGPU_ANSWER, 0, NULL); /* waits while the target is stopped or frozen */
    if (channel->result != CUDA_SUCCESS) {
        channel->result = channel_close(channel, channel->result);
        return false;
    }
    bool met = simgpu_meet_fault(call_names[call], channel->pid, &channel->fault);
    if (channel->fault.signal_delay_ms != 0)
        simgpu_doom(channel->target, &channel->fault);
    if (!channel_target_lives(channel) || simgpu_is_doomed(channel->target)) {
        channel->result = channel_close(channel, CUDA_ERROR_OPERATING_SYSTEM);
        return false;
    }
    if (met && (channel->fault.error != 0 || channel->fault.skip)) {
        channel->result = channel_close(channel, (CUresult)channel->fault.error);
        return false;
    }
    return true;
}

CUresult channel_ask(const struct channel *channel, enum simgpu_request request, uint64_t time_us,
                     const uint8_t *new_of) {
    struct simgpu_process *target = channel->target;
    if (!simgpu_lock()) /* so that the record can't be given to another process in between */
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (channel_owns_record(channel)) {
        if (new_of != NULL)
            memcpy(target->destination, new_of, SIMGPU_MAX_GPUS);
        target->request_us = time_us;
        atomic_store(&target->request, request);
    }
    simgpu_unlock();
    simgpu_wake_word(&target->request);
    while (atomic_load(&target->request) != SIMGPU_NO_REQUEST) {
        simgpu_wait_word(&target->request, request, LIVENESS_INTERVAL_MS);
        if (!channel_owns_record(channel) || !simgpu_record_is_live(target))
            return CUDA_ERROR_OPERATING_SYSTEM;
    }
    return (CUresult)target->request_result;
}

/* Closes the gate, waits until no device call runs, and moves the bytes to the place that fits a forced state. */
static void force_residence(const struct channel *channel, bool resident) {
    struct simgpu_process *target = channel->target;
    atomic_fetch_or(&target->status, SIMGPU_GATE_CLOSED);
    while (atomic_load(&target->in_flight) != 0 && channel_target_lives(channel))
        simgpu_sleep_us(POLL_US);
    uint8_t same[SIMGPU_MAX_GPUS];
    for (uint32_t gpu = 0; gpu < SIMGPU_MAX_GPUS; gpu++)
        same[gpu] = (uint8_t)gpu;
    (void)channel_ask(channel, resident ? SIMGPU_PLACE : SIMGPU_EVICT, 0, same);
}

/* Applies the state of a fault. The bytes follow the state, unless the fault skips the call. After a skipped call, a
 * process that runs without its bytes reads poison. */
static void force_state(const struct channel *channel, uint32_t state) {
    struct simgpu_process *target = channel->target;
    bool resident = state != CU_PROCESS_STATE_CHECKPOINTED || channel->fault.keep_memory;
    if (resident != ((atomic_load(&target->status) & SIMGPU_RESIDENT) != 0)) {
        if (!channel->fault.skip)
            force_residence(channel, resident);
        else if (!resident)
            memset(target->memory_slots, 0, sizeof target->memory_slots);
    }
    uint32_t status = atomic_load(&target->status) & (SIMGPU_PLACEMENT | SIMGPU_WEDGED);
    if (resident)
        status |= SIMGPU_RESIDENT;
    if (state != CU_PROCESS_STATE_RUNNING)
        status |= SIMGPU_GATE_CLOSED;
    simgpu_set_status(target, status | state);
}

CUresult channel_close(struct channel *channel, CUresult result) {
    if (!channel_target_lives(channel))
        result = CUDA_ERROR_OPERATING_SYSTEM;
    else if (channel->fault.state != SIMGPU_NO_STATE)
        force_state(channel, (uint32_t)channel->fault.state & SIMGPU_STATE_MASK);
    release(channel);
    return result;
}
