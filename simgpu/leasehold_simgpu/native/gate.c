/* The gate that every device call of a process passes.
 *
 * A caller first increments the count, then checks the gate, and decrements the count again if the gate is closed. A
 * lock first closes the gate, then waits until the count is 0. Both orders are sequentially consistent, so a lock never
 * misses a call. A waiter sleeps on the status word and uses no CPU.
 */
#include "driver.h"
#include "delayed_death.h"
#include "faults.h"
#include "process_table.h"

#include <unistd.h>

#define HEAL_INTERVAL_MS 250

static bool channel_is_in_use(const struct simgpu_process *self) {
    pid_t owner = *(volatile const int32_t *)&self->channel_pid;
    return owner != 0 && process_start_time(owner) != 0; /* any start time: an image changes it */
}

/* Reopens the gate if a controller died while it waited for this process to drain. */
static void reopen_if_abandoned(struct simgpu_process *self, uint32_t status) {
    if ((status & SIMGPU_STATE_MASK) != CU_PROCESS_STATE_RUNNING || channel_is_in_use(self) || simgpu_is_doomed(self))
        return;
    if (atomic_compare_exchange_strong(&self->status, &status, status & ~SIMGPU_GATE_CLOSED))
        simgpu_wake_word(&self->status);
}

/* False: the record was given to another process while this one was in an image. */
static bool pass_gate(struct simgpu_process *self) {
    for (;;) {
        if (self->id != simgpu_record_id)
            return false;
        atomic_fetch_add(&self->in_flight, 1);
        uint32_t status = atomic_load(&self->status);
        if (!(status & SIMGPU_GATE_CLOSED))
            return true;
        simgpu_leave(CUDA_SUCCESS);
        simgpu_wait_word(&self->status, status, HEAL_INTERVAL_MS);
        if (atomic_load(&self->status) == status)
            reopen_if_abandoned(self, status);
    }
}

CUresult simgpu_leave(CUresult result) {
    struct simgpu_process *self = simgpu_self;
    if (atomic_fetch_sub(&self->in_flight, 1) == 1 && (atomic_load(&self->status) & SIMGPU_GATE_CLOSED))
        simgpu_wake_word(&self->in_flight);
    return result;
}

static CUresult find_usable_context(struct context **context) {
    struct context *current = NULL;
    CUresult result = simgpu_find_context(NULL, &current);
    if (result != CUDA_SUCCESS)
        return result;
    if (simgpu_host()->gpus[simgpu_gpu_of(simgpu_self, current->ordinal)].lost)
        return CUDA_ERROR_UNKNOWN;
    if (context != NULL)
        *context = current;
    return CUDA_SUCCESS;
}

CUresult simgpu_enter(const char *call, enum call_kind kind, struct context **context) {
    struct simgpu_fault fault;
    if (simgpu_meet_fault(call, getpid(), &fault) && fault.error != 0)
        return (CUresult)fault.error;
    if (kind == NEEDS_NOTHING)
        return CUDA_SUCCESS;
    if (simgpu_self == NULL)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (kind == NEEDS_DRIVER)
        return CUDA_SUCCESS;
    if (!pass_gate(simgpu_self))
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = kind == NEEDS_CONTEXT ? find_usable_context(context) : CUDA_SUCCESS;
    return result == CUDA_SUCCESS ? CUDA_SUCCESS : simgpu_leave(result);
}
