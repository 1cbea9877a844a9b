/* Pinned host memory: memory of the process that GPUs reach by the same address. It takes nothing on a GPU. */
#ifndef SIMGPU_PINNED_MEMORY_H
#define SIMGPU_PINNED_MEMORY_H

#include "driver.h"

/* Is the range inside pinned memory of this process? Under simgpu_objects. */
bool simgpu_is_pinned_memory(CUdeviceptr address, size_t bytes);

/* An attribute of an address in pinned memory. Under simgpu_objects. */
CUresult simgpu_pinned_attribute(void *data, int attribute, CUdeviceptr address);

#endif
