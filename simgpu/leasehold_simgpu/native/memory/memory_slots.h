/* Assignment of the physical memory of a GPU to processes.
 *
 * A process that takes memory on a GPU gets a slot there: the lowest number from 1 that no other resident process
 * has. It keeps the slot until a checkpoint; a restore gives it another one. Within its slot its allocations start at
 * offset 0.
 *
 * With `exclusive_memory`, only processes of the same workload avoid each other: the first process of every workload
 * has slot 1. So two workloads that are resident on one GPU at the same time overwrite each other. A workload is what
 * carries the same LEASEHOLD_WORKLOAD_ID, or the same session of processes (setsid) where there is none.
 */
#ifndef SIMGPU_MEMORY_SLOTS_H
#define SIMGPU_MEMORY_SLOTS_H

#include "host/state.h"

/* The workload of the calling process. */
uint64_t memory_slots_workload(void);

/* Removes the bytes of processes that died. Under the lock. */
void memory_slots_reclaim(void);

/* Gives a process a slot on a GPU, for its CUDA device `ordinal`. A slot that nobody had is empty. Under the lock. */
void memory_slots_take(struct simgpu_host *host, struct simgpu_process *process, uint32_t ordinal, uint32_t gpu);

#endif
