/* Devices: queries that need no context. They answer while the process is locked. */
#include "driver.h"

#include <stdio.h>
#include <string.h>

#define LARGEST_GRID_X 2147483647

struct simgpu_gpu *simgpu_device(CUdevice device) {
    if (device < 0 || (uint32_t)device >= simgpu_self->visible_count)
        return NULL;
    return &simgpu_host()->gpus[simgpu_gpu_of(simgpu_self, (uint32_t)device)];
}

/* Begins every call here: checks that cuInit was called, that `out` is not NULL, and that the device exists. */
static CUresult begin(const char *call, const void *out, CUdevice device, struct simgpu_gpu **gpu) {
    CUresult result = simgpu_enter(call, NEEDS_DRIVER, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *gpu = simgpu_device(device);
    return *gpu == NULL ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetCount(int *count) {
    CUresult result = simgpu_enter("cuDeviceGetCount", NEEDS_DRIVER, NULL);
    if (result == CUDA_SUCCESS)
        *count = (int)simgpu_self->visible_count;
    return result;
}

EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    struct simgpu_gpu *gpu;
    CUresult result = begin("cuDeviceGet", device, ordinal, &gpu);
    if (result == CUDA_SUCCESS)
        *device = ordinal;
    return result;
}

EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device) {
    struct simgpu_gpu *gpu;
    CUresult result = begin("cuDeviceGetName", name, device, &gpu);
    if (result == CUDA_SUCCESS)
        snprintf(name, (size_t)length, "%s", gpu->name);
    return result;
}

EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    struct simgpu_gpu *gpu;
    CUresult result = begin("cuDeviceGetUuid", uuid, device, &gpu);
    if (result == CUDA_SUCCESS)
        memcpy(uuid->bytes, gpu->uuid, sizeof gpu->uuid);
    return result;
}

/* Version 1 differs for MIG instances only, of which simgpu has none. */
EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    return cuDeviceGetUuid_v2(uuid, device);
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device) {
    struct simgpu_gpu *gpu;
    CUresult result = begin("cuDeviceTotalMem", bytes, device, &gpu);
    if (result == CUDA_SUCCESS)
        *bytes = gpu->memory_bytes;
    return result;
}

EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device) {
    struct simgpu_gpu *gpu;
    CUresult result = begin("cuDeviceGetPCIBusId", text, device, &gpu);
    if (result != CUDA_SUCCESS)
        return result;
    int written = snprintf(text, (size_t)length, "%04X:%02X:%02X.0", gpu->pci_domain, gpu->pci_bus, gpu->pci_device);
    return written >= length ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text) {
    CUresult result = simgpu_enter("cuDeviceGetByPCIBusId", NEEDS_DRIVER, NULL);
    unsigned domain, bus, slot;
    if (result != CUDA_SUCCESS)
        return result;
    if (device == NULL || text == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &slot) != 2)
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (CUdevice candidate = 0; candidate < (CUdevice)simgpu_self->visible_count; candidate++) {
        const struct simgpu_gpu *gpu = simgpu_device(candidate);
        if (gpu->pci_domain == domain && gpu->pci_bus == bus && gpu->pci_device == slot) {
            *device = candidate;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

static int attribute_of(const struct simgpu_gpu *gpu, int attribute) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z:
        return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        return LARGEST_GRID_X;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z:
        return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return 49152;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY:
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        return 65536;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return 32;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
        return 1980000; /* kHz */
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return (int)gpu->multiprocessors;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
        return 2048;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        return 3;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return (int)gpu->pci_bus;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        return (int)gpu->pci_device;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        return (int)gpu->pci_domain;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return (int)gpu->compute_major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return (int)gpu->compute_minor;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        return 1;
    default:
        return 0;
    }
}

EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    struct simgpu_gpu *gpu;
    CUresult result = begin("cuDeviceGetAttribute", value, device, &gpu);
    if (result == CUDA_SUCCESS && attribute <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS)
        *value = attribute_of(gpu, attribute);
    return result;
}

EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device) {
    struct simgpu_gpu *gpu;
    CUresult result = begin("cuDeviceComputeCapability", major, device, &gpu);
    if (result == CUDA_SUCCESS) {
        *major = (int)gpu->compute_major;
        *minor = (int)gpu->compute_minor;
    }
    return result;
}

EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    struct simgpu_gpu *gpu;
    CUresult result = begin("cuDeviceCanAccessPeer", can, device, &gpu);
    if (result == CUDA_SUCCESS && simgpu_device(peer) == NULL)
        result = CUDA_ERROR_INVALID_DEVICE;
    if (result == CUDA_SUCCESS)
        *can = 0;
    return result;
}
