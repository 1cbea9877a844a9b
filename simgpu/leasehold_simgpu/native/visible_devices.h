/* The GPUs that a process sees by CUDA_VISIBLE_DEVICES. */
#ifndef SIMGPU_VISIBLE_DEVICES_H
#define SIMGPU_VISIBLE_DEVICES_H

#include "state.h"

/* Writes the indices of the visible GPUs, in order, and returns how many there are. `list` may be NULL: all. */
uint32_t visible_devices(const struct simgpu_host *host, const char *list, uint8_t gpus[SIMGPU_MAX_GPUS]);

#endif
