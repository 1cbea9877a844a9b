#include "process/residence.h"

#include <errno.h>
#include <string.h>

#include "host/waits.h"
#include "memory/device_memory.h"
#include "memory/memory_slots.h"
#include "process/allocations.h"

/* Changes the state and these bits, and keeps the other bits. */
static void move_to(struct simgpu_process *self, uint32_t state, uint32_t set, uint32_t clear) {
    uint32_t status = atomic_load(&self->status) & ~(SIMGPU_STATE_MASK | clear);
    simgpu_set_status(self, status | set | state);
}

static void drop_copies(void) {
    for (struct allocation *allocation = simgpu_allocations; allocation != NULL; allocation = allocation->next)
        host_copies_drop(&allocation->copies);
}

static bool copy_out(const struct simgpu_process *self) {
    for (struct allocation *allocation = simgpu_allocations; allocation != NULL; allocation = allocation->next) {
        uint32_t gpu = simgpu_gpu_of(self, allocation->ordinal), slot = self->memory_slots[allocation->ordinal];
        if (slot == 0)
            continue; /* a fault has said that a restore was made */
        host_copies_drop(&allocation->copies);
        if (!host_copies_make(&allocation->copies, gpu, slot, allocation->offset, allocation->bytes))
            return false;
    }
    return true;
}

/* False: some bytes still have their values. */
static bool erase(const struct simgpu_process *self) {
    bool done = true;
    for (struct allocation *allocation = simgpu_allocations; allocation != NULL; allocation = allocation->next)
        done &= device_memory_erase(simgpu_gpu_of(self, allocation->ordinal), self->memory_slots[allocation->ordinal],
                                    allocation->offset, allocation->bytes);
    return done;
}

static bool copy_in(const struct simgpu_process *self) {
    for (struct allocation *allocation = simgpu_allocations; allocation != NULL; allocation = allocation->next)
        if (!host_copies_write(allocation->copies, simgpu_gpu_of(self, allocation->ordinal),
                               self->memory_slots[allocation->ordinal]))
            return false;
    return true;
}

CUresult residence_evict(struct simgpu_process *self) {
    if (!(atomic_load(&self->status) & SIMGPU_RESIDENT)) {
        move_to(self, CU_PROCESS_STATE_CHECKPOINTED, 0, 0);
        return CUDA_SUCCESS;
    }
    CUresult result = CUDA_SUCCESS;
    if (!copy_out(self)) {
        result = errno == ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_OPERATING_SYSTEM;
    } else if (!erase(self)) {
        (void)copy_in(self); /* the part that was erased */
        result = CUDA_ERROR_OPERATING_SYSTEM;
    }
    if (result != CUDA_SUCCESS) {
        drop_copies();
        return result;
    }
    memset(self->memory_slots, 0, sizeof self->memory_slots);
    move_to(self, CU_PROCESS_STATE_CHECKPOINTED, 0, SIMGPU_RESIDENT);
    return CUDA_SUCCESS;
}

/* Whether the destination GPUs have enough free memory. Under the lock. */
static CUresult find_room(struct simgpu_host *host, const struct simgpu_process *self) {
    for (uint32_t ordinal = 0; ordinal < self->visible_count; ordinal++) {
        uint32_t gpu = self->destination[simgpu_gpu_of(self, ordinal)];
        uint64_t bytes = simgpu_bytes_of(host, self, ordinal);
        uint64_t used = simgpu_used_bytes(host, gpu, self), total = host->gpus[gpu].memory_bytes;
        if (bytes != 0 && host->gpus[gpu].lost)
            return CUDA_ERROR_UNKNOWN;
        if (bytes != 0 && (used > total || bytes > total - used))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

/* Counts the memory again. A process that comes back from an image has the allocations of the image, and the record
 * those of a process that came back from it before, and ended. Under the lock. */
static void recount(struct simgpu_process *self) {
    memset(self->allocated_bytes, 0, sizeof self->allocated_bytes);
    for (struct allocation *allocation = simgpu_allocations; allocation != NULL; allocation = allocation->next)
        self->allocated_bytes[allocation->ordinal] += allocation->bytes;
}

/* Takes the room on the new GPUs. The placement is written to the row that does not hold yet; the one store of the
 * status makes row and residence hold together. Under the lock. */
static void take_room(struct simgpu_host *host, struct simgpu_process *self) {
    uint32_t flipped = (atomic_load(&self->status) & SIMGPU_PLACEMENT) ^ SIMGPU_PLACEMENT;
    uint8_t *row = self->placement[flipped ? 1 : 0];
    for (uint32_t ordinal = 0; ordinal < self->visible_count; ordinal++) {
        row[ordinal] = self->destination[simgpu_gpu_of(self, ordinal)];
        if (self->allocated_bytes[ordinal] != 0)
            memory_slots_take(host, self, ordinal, row[ordinal]);
    }
    move_to(self, CU_PROCESS_STATE_CHECKPOINTED, SIMGPU_RESIDENT | flipped, SIMGPU_PLACEMENT);
}

/* The other row still has the placement that held before. */
static void give_room_back(struct simgpu_process *self) {
    uint32_t flipped = (atomic_load(&self->status) & SIMGPU_PLACEMENT) ^ SIMGPU_PLACEMENT;
    (void)erase(self); /* the restore has failed already */
    memset(self->memory_slots, 0, sizeof self->memory_slots);
    move_to(self, CU_PROCESS_STATE_CHECKPOINTED, flipped, SIMGPU_RESIDENT | SIMGPU_PLACEMENT);
}

CUresult residence_place(struct simgpu_process *self) {
    struct simgpu_host *host = simgpu_host();
    CUresult result = residence_evict(self); /* if a fault has left the bytes on the old GPUs */
    if (result != CUDA_SUCCESS)
        return result;
    if (!simgpu_lock())
        return CUDA_ERROR_OPERATING_SYSTEM;
    recount(self);
    result = find_room(host, self);
    if (result == CUDA_SUCCESS)
        take_room(host, self);
    else if (result == CUDA_ERROR_OUT_OF_MEMORY)
        move_to(self, CU_PROCESS_STATE_CHECKPOINTED, SIMGPU_WEDGED, 0);
    simgpu_unlock();
    if (result != CUDA_SUCCESS)
        return result;
    simgpu_sleep_us(self->request_us); /* a restore without enough memory has ended by now, as on a real GPU */
    if (!copy_in(self)) {
        give_room_back(self);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    drop_copies();
    move_to(self, CU_PROCESS_STATE_LOCKED, 0, 0);
    return CUDA_SUCCESS;
}
