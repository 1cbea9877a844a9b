/* The CUDA devices of this process. */
#ifndef SIMGPU_DEVICES_H
#define SIMGPU_DEVICES_H

#include "api/driver_types.h"
#include "host/state.h"

/* The present GPU of a CUDA device, or NULL if the device does not exist. */
struct simgpu_gpu *simgpu_device(CUdevice device);

#endif
