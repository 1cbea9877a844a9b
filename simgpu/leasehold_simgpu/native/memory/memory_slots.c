#include "memory/memory_slots.h"

#include <stdlib.h>
#include <unistd.h>

#include "memory/device_memory.h"

#define SLOTS (SIMGPU_MAX_PROCESSES + 2) /* slot 0 is none, and the last one is always free */

/* FNV-1a: short, and the same in every process. */
static uint64_t hash(const char *text) {
    uint64_t value = 0xcbf29ce484222325u;
    for (; *text != '\0'; text++)
        value = (value ^ (unsigned char)*text) * 0x100000001b3u;
    return value;
}

uint64_t memory_slots_workload(void) {
    const char *mark = getenv("LEASEHOLD_WORKLOAD_ID");
    return mark != NULL && *mark != '\0' ? hash(mark) : (uint64_t)getsid(0);
}

/* The slot of a resident process on a GPU, or 0. */
static uint32_t slot_on(const struct simgpu_process *process, uint32_t gpu) {
    if (process->pid == 0 || !(atomic_load(&process->status) & SIMGPU_RESIDENT))
        return 0;
    for (uint32_t ordinal = 0; ordinal < process->visible_count; ordinal++)
        if (process->memory_slots[ordinal] != 0 && simgpu_gpu_of(process, ordinal) == gpu)
            return process->memory_slots[ordinal];
    return 0;
}

static bool has_owner(uint32_t gpu, uint32_t slot) {
    const struct simgpu_host *host = simgpu_host();
    for (uint32_t index = 0; index < SIMGPU_MAX_PROCESSES; index++)
        if (slot_on(&host->processes[index], gpu) == slot && simgpu_record_is_live(&host->processes[index]))
            return true;
    return false;
}

void memory_slots_reclaim(void) {
    device_memory_erase_slots(has_owner);
}

void memory_slots_take(struct simgpu_host *host, struct simgpu_process *process, uint32_t ordinal, uint32_t gpu) {
    bool forbidden[SLOTS] = {false};
    memory_slots_reclaim();
    for (uint32_t index = 0; index < SIMGPU_MAX_PROCESSES; index++) {
        const struct simgpu_process *other = &host->processes[index];
        uint32_t slot = other == process ? 0 : slot_on(other, gpu);
        if (slot != 0 && (!host->exclusive_memory || other->workload == process->workload) &&
            simgpu_record_is_live(other))
            forbidden[slot] = true;
    }
    uint32_t slot = 1;
    while (forbidden[slot])
        slot++;
    process->memory_slots[ordinal] = (uint16_t)slot;
}
