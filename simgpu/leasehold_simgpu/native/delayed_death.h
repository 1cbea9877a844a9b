/* A target that dies some seconds after the call that killed it. The driver has returned CUDA_ERROR_OPERATING_SYSTEM
 * already, while the kernel still writes the core dump (NVIDIA/cuda-checkpoint issue 58). */
#ifndef SIMGPU_DELAYED_DEATH_H
#define SIMGPU_DELAYED_DEATH_H

#include "state.h"

/* Kills the process by the fault's signal after the fault's delay, even if the caller has ended. Until then no call on
 * the process succeeds, and none of its device calls returns. */
void simgpu_doom(struct simgpu_process *process, const struct simgpu_fault *fault);

bool simgpu_is_doomed(const struct simgpu_process *process);

/* Serves SIMGPU_DIE, in the restore thread of the process. */
_Noreturn void simgpu_die(const struct simgpu_process *self);

#endif
