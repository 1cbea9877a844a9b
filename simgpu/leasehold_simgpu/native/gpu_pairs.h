/* The map of a restore: which GPU each GPU becomes. */
#ifndef SIMGPU_GPU_PAIRS_H
#define SIMGPU_GPU_PAIRS_H

#include "driver_types.h"
#include "state.h"

/* Reads the pairs into `new_of`, by index of the old GPU. By the driver API reference and cuda-python issue 1983, they
 * must cover every GPU of the host, used or not. No GPU may occur twice on either side, and both sides must be of the
 * same chip. Otherwise CUDA_ERROR_INVALID_VALUE. Without pairs, every GPU maps to itself. */
CUresult gpu_pairs_read(const struct simgpu_host *host, const CUcheckpointGpuPair *pairs, uint32_t count,
                        uint8_t new_of[SIMGPU_MAX_GPUS]);

#endif
