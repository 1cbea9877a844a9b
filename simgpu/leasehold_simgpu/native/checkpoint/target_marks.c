/* Each rule here has its source: numbers are issues of NVIDIA/cuda-checkpoint. */
#include "checkpoint/target_marks.h"

bool has_multicast_group(const struct simgpu_process *target) {
    return *(volatile const uint32_t *)&target->multicast != 0;
}

/* CUPTI, as of torch.profiler: the lock answers at once, and the target runs on (seen on driver 580.159.04). */
CUresult lock_obstacle(const struct simgpu_process *target) {
    return target->profiler ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

/* cuIpcOpenMemHandle, without a call of cuIpcCloseMemHandle before the checkpoint (seen on driver 580.159.04). */
CUresult restore_obstacle(const struct simgpu_process *target) {
    return target->ipc_importer ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* MPS, a container that was given some of the host's GPUs only (issues 18 and 24), or a GPU that is lost or split into
 * MIG instances (issue 42). */
CUresult checkpoint_obstacle(const struct simgpu_host *host, const struct simgpu_process *target) {
    if (target->mps_client)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (target->partial_passthrough)
        return CUDA_ERROR_NOT_PERMITTED;
    for (uint32_t ordinal = 0; ordinal < target->visible_count; ordinal++) {
        const struct simgpu_gpu *gpu = &host->gpus[simgpu_gpu_of(target, ordinal)];
        if (target->contexts[ordinal] == 0)
            continue;
        if (gpu->lost)
            return CUDA_ERROR_UNKNOWN;
        if (gpu->mig_enabled)
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

/* Any call on one rank of NCCL, even a question for its state, blocks while another rank is LOCKED or CHECKPOINTED, and
 * is carried out once that rank runs (issue 30). */
bool peer_is_suspended(const struct simgpu_host *host, const struct simgpu_process *target) {
    uint32_t group = *(volatile const uint32_t *)&target->peer_group;
    if (group == 0 || !simgpu_lock())
        return false;
    bool found = false;
    for (int slot = 0; slot < SIMGPU_MAX_PROCESSES && !found; slot++) {
        const struct simgpu_process *peer = &host->processes[slot];
        uint32_t state = atomic_load(&peer->status) & SIMGPU_STATE_MASK;
        found = peer != target && peer->peer_group == group && state != CU_PROCESS_STATE_RUNNING &&
                simgpu_record_is_live(peer);
    }
    simgpu_unlock();
    return found;
}
