/* NVML as a whole: initialisation, versions, error texts, and finding a device. */
#include "nvml/nvml.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#include "host/faults.h"
#include "host/uuid_text.h"

static _Atomic int users;

nvmlReturn_t nvml_enter(const char *call) {
    struct simgpu_fault fault;
    if (simgpu_meet_fault(call, getpid(), &fault) && fault.error != 0)
        return (nvmlReturn_t)fault.error;
    return atomic_load(&users) > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

uint32_t nvml_index(nvmlDevice_t device) {
    return (uint32_t)(device - simgpu_host()->gpus);
}

nvmlReturn_t nvml_enter_device(const char *call, nvmlDevice_t device, const void *out) {
    nvmlReturn_t result = nvml_enter(call);
    if (result != NVML_SUCCESS)
        return result;
    struct simgpu_host *host = simgpu_host();
    if (out == NULL || device < host->gpus || device >= host->gpus + host->gpu_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    return device->lost ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    struct simgpu_fault fault;
    (void)flags;
    if (simgpu_meet_fault("nvmlInit", getpid(), &fault) && fault.error != 0)
        return (nvmlReturn_t)fault.error;
    if (simgpu_host() == NULL)
        return NVML_ERROR_DRIVER_NOT_LOADED;
    atomic_fetch_add(&users, 1);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlShutdown(void) {
    nvmlReturn_t result = nvml_enter("nvmlShutdown");
    if (result == NVML_SUCCESS)
        atomic_fetch_sub(&users, 1);
    return result;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t error) {
    switch (error) {
#define AS_CASE(name, value, text) \
    case name:                     \
        return text;
        NVML_ERRORS(AS_CASE)
#undef AS_CASE
    }
    return "Unknown Error";
}

static nvmlReturn_t copy_text(char *to, unsigned length, const char *text) {
    if (to == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    nvmlReturn_t result = nvml_enter("nvmlSystemGetDriverVersion");
    return result != NVML_SUCCESS ? result : copy_text(version, length, simgpu_host()->driver_version);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned length) {
    char text[48];
    nvmlReturn_t result = nvml_enter("nvmlSystemGetNVMLVersion");
    if (result != NVML_SUCCESS)
        return result;
    snprintf(text, sizeof text, "%u.%s", simgpu_host()->cuda_version / 1000, simgpu_host()->driver_version);
    return copy_text(version, length, text);
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) {
    nvmlReturn_t result = nvml_enter("nvmlSystemGetCudaDriverVersion");
    if (result == NVML_SUCCESS)
        *version = (int)simgpu_host()->cuda_version;
    return result;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    nvmlReturn_t result = nvml_enter("nvmlDeviceGetCount");
    if (result == NVML_SUCCESS)
        *count = simgpu_host()->gpu_count;
    return result;
}

/* A lost GPU keeps its index, but no handle to it can be had. */
static nvmlReturn_t hand_out(struct simgpu_gpu *gpu, nvmlDevice_t *device) {
    if (gpu->lost)
        return NVML_ERROR_GPU_IS_LOST;
    *device = gpu;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    nvmlReturn_t result = nvml_enter("nvmlDeviceGetHandleByIndex");
    if (result != NVML_SUCCESS)
        return result;
    struct simgpu_host *host = simgpu_host();
    return index < host->gpu_count ? hand_out(&host->gpus[index], device) : NVML_ERROR_INVALID_ARGUMENT;
}

/* With or without the prefix: cuda.core asks without. */
static bool is_uuid(const struct simgpu_gpu *gpu, const char *uuid) {
    char text[UUID_TEXT_SIZE];
    uuid_to_text(gpu->uuid, text);
    return strcasecmp(text, uuid) == 0 || strcasecmp(text + strlen("GPU-"), uuid) == 0;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    nvmlReturn_t result = nvml_enter("nvmlDeviceGetHandleByUUID");
    if (result != NVML_SUCCESS)
        return result;
    struct simgpu_host *host = simgpu_host();
    for (uint32_t gpu = 0; uuid != NULL && gpu < host->gpu_count; gpu++)
        if (is_uuid(&host->gpus[gpu], uuid))
            return hand_out(&host->gpus[gpu], device);
    return uuid == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) {
    nvmlReturn_t result = nvml_enter("nvmlDeviceGetHandleBySerial");
    if (result != NVML_SUCCESS)
        return result;
    struct simgpu_host *host = simgpu_host();
    for (uint32_t gpu = 0; serial != NULL && gpu < host->gpu_count; gpu++)
        if (strcmp(host->gpus[gpu].serial, serial) == 0)
            return hand_out(&host->gpus[gpu], device);
    return serial == NULL ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device) {
    nvmlReturn_t result = nvml_enter("nvmlDeviceGetHandleByPciBusId");
    unsigned domain = 0, bus, slot;
    if (result != NVML_SUCCESS)
        return result;
    if (text == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        domain = 0;
        if (sscanf(text, "%x:%x", &bus, &slot) != 2)
            return NVML_ERROR_INVALID_ARGUMENT;
    }
    struct simgpu_host *host = simgpu_host();
    for (uint32_t gpu = 0; gpu < host->gpu_count; gpu++) {
        struct simgpu_gpu *candidate = &host->gpus[gpu];
        if (candidate->pci_domain == domain && candidate->pci_bus == bus && candidate->pci_device == slot)
            return hand_out(candidate, device);
    }
    return NVML_ERROR_NOT_FOUND;
}
