/* The GPUs that a process sees by CUDA_VISIBLE_DEVICES. */
#ifndef SIMGPU_VISIBLE_DEVICES_H
#define SIMGPU_VISIBLE_DEVICES_H

#include "api/driver_types.h"
#include "host/state.h"

/* Writes the indices of the visible GPUs, in order. `list` may be NULL: all. CUDA_ERROR_NO_DEVICE if there are none,
 * CUDA_ERROR_INVALID_DEVICE if the list names a GPU twice. */
CUresult visible_devices(const struct simgpu_host *host, const char *list, uint8_t gpus[SIMGPU_MAX_GPUS],
                         uint32_t *count);

#endif
