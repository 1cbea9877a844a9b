/* Properties of a target that make calls on it fail or hang. */
#ifndef SIMGPU_TARGET_MARKS_H
#define SIMGPU_TARGET_MARKS_H

#include "api/driver_types.h"
#include "host/state.h"

/* Whether the target has a multicast group (NVLS). Such a process never finishes its checkpoint (NVIDIA/nccl pull
 * request 2340). */
bool has_multicast_group(const struct simgpu_process *target);

/* CUDA_ERROR_NOT_SUPPORTED if the target has an attached profiler, or CUDA_SUCCESS. */
CUresult lock_obstacle(const struct simgpu_process *target);

/* CUDA_ERROR_INVALID_VALUE if the target has imported memory of another process, or CUDA_SUCCESS. */
CUresult restore_obstacle(const struct simgpu_process *target);

/* The first reason why the target cannot be checkpointed, or CUDA_SUCCESS. */
CUresult checkpoint_obstacle(const struct simgpu_host *host, const struct simgpu_process *target);

/* Whether a peer of the target is not RUNNING. No call on the target returns then. */
bool peer_is_suspended(const struct simgpu_host *host, const struct simgpu_process *target);

#endif
