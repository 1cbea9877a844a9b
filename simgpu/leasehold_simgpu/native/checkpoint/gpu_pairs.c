#include "checkpoint/gpu_pairs.h"

#include <string.h>

static int find(const struct simgpu_host *host, const CUuuid *uuid) {
    for (uint32_t gpu = 0; gpu < host->gpu_count; gpu++)
        if (memcmp(host->gpus[gpu].uuid, uuid->bytes, sizeof uuid->bytes) == 0)
            return (int)gpu;
    return -1;
}

CUresult gpu_pairs_read(const struct simgpu_host *host, const CUcheckpointGpuPair *pairs, uint32_t count,
                        uint8_t new_of[SIMGPU_MAX_GPUS]) {
    for (uint32_t gpu = 0; gpu < host->gpu_count; gpu++)
        new_of[gpu] = (uint8_t)gpu;
    if (count == 0)
        return CUDA_SUCCESS;
    if (pairs == NULL || count != host->gpu_count)
        return CUDA_ERROR_INVALID_VALUE;
    uint32_t old_seen = 0, new_seen = 0;
    for (uint32_t index = 0; index < count; index++) {
        int from = find(host, &pairs[index].oldUuid), to = find(host, &pairs[index].newUuid);
        if (from < 0 || to < 0 || (old_seen >> from & 1) || (new_seen >> to & 1))
            return CUDA_ERROR_INVALID_VALUE;
        if (strcmp(host->gpus[from].name, host->gpus[to].name) != 0)
            return CUDA_ERROR_INVALID_VALUE;
        old_seen |= 1u << from;
        new_seen |= 1u << to;
        new_of[from] = (uint8_t)to;
    }
    return CUDA_SUCCESS;
}
