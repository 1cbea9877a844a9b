/* Each rule here has its source: numbers are issues of NVIDIA/cuda-checkpoint. */
#include "target_marks.h"

#define POLL_US 20000

/* A process with a live multicast group (NVLS) never finishes its checkpoint (NVIDIA/nccl pull request 2340). */
static void wait_for_end_of_multicast(const struct channel *channel) {
    while (*(volatile const uint32_t *)&channel->target->multicast && channel_target_lives(channel))
        simgpu_sleep_us(POLL_US);
}

/* MPS, a container that was given some of the host's GPUs only (issues 18 and 24), or a GPU that is lost or split into
 * MIG instances (issue 42). */
CUresult checkpoint_obstacle(const struct channel *channel) {
    wait_for_end_of_multicast(channel);
    if (channel->target->mps_client)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (channel->target->partial_passthrough)
        return CUDA_ERROR_NOT_PERMITTED;
    for (uint32_t ordinal = 0; ordinal < channel->target->visible_count; ordinal++) {
        const struct simgpu_gpu *gpu = &channel->host->gpus[simgpu_gpu_of(channel->target, ordinal)];
        if (channel->target->contexts[ordinal] == 0)
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
bool peer_is_suspended(const struct channel *channel) {
    const struct simgpu_process *target = channel->target;
    uint32_t group = *(volatile const uint32_t *)&target->peer_group;
    if (group == 0 || !simgpu_lock())
        return false;
    bool found = false;
    for (int slot = 0; slot < SIMGPU_MAX_PROCESSES && !found; slot++) {
        const struct simgpu_process *peer = &channel->host->processes[slot];
        uint32_t state = atomic_load(&peer->status) & SIMGPU_STATE_MASK;
        found = peer != target && peer->peer_group == group && state != CU_PROCESS_STATE_RUNNING &&
                simgpu_record_is_live(peer);
    }
    simgpu_unlock();
    return found;
}
