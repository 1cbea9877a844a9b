/* Shared declarations of the simulated libnvidia-ml.so.1. A device handle is the address of the GPU's record. */
#ifndef SIMGPU_NVML_H
#define SIMGPU_NVML_H

#include "nvml_types.h"
#include "state.h"

/* Starts an NVML call: applies its faults and checks that NVML is initialised. */
nvmlReturn_t nvml_enter(const char *call);

/* As nvml_enter(), for a call about a device: also sees that it is one, and not lost. `out` is where the answer
 * goes. */
nvmlReturn_t nvml_enter_device(const char *call, nvmlDevice_t device, const void *out);

uint32_t nvml_index(nvmlDevice_t device);

#endif
