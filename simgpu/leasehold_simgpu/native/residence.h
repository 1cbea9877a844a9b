/* The place of this process's bytes: on its GPUs, or in its host memory.
 *
 * The restore thread calls these while the gate is closed and drained, so that no call of the program uses device
 * memory. If the process is killed in the middle, its record and its slots count as free.
 */
#ifndef SIMGPU_RESIDENCE_H
#define SIMGPU_RESIDENCE_H

#include "driver_types.h"
#include "state.h"

/* Copies all device memory out, poisons it on the GPUs, and makes the process CHECKPOINTED.
 * CUDA_ERROR_OUT_OF_MEMORY if the host has no memory for the copies. After an error nothing has changed. */
CUresult residence_evict(struct simgpu_process *self);

/* Allocates memory on the GPUs of `destination`, copies everything in, and makes the process LOCKED.
 * CUDA_ERROR_OUT_OF_MEMORY if a GPU has too little memory, which wedges the process. Other errors change nothing. */
CUresult residence_place(struct simgpu_process *self);

#endif
