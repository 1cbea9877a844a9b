/* Xid events. A set stores the number of the next Xid for each registered GPU. */
#include "nvml.h"

#include <stdlib.h>
#include <time.h>

#include "faults.h"

#define POLL_US 20000

struct nvml_event_set {
    bool registered[SIMGPU_MAX_GPUS];
    uint32_t next[SIMGPU_MAX_GPUS];
};

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetSupportedEventTypes", device, types);
    if (result == NVML_SUCCESS)
        *types = nvmlEventTypeXidCriticalError;
    return result;
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    nvmlReturn_t result = nvml_enter("nvmlEventSetCreate");
    if (result != NVML_SUCCESS)
        return result;
    if (set == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    return *set == NULL ? NVML_ERROR_MEMORY : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceRegisterEvents", device, set);
    if (result != NVML_SUCCESS)
        return result;
    if (types & ~(unsigned long long)nvmlEventTypeXidCriticalError)
        return NVML_ERROR_NOT_SUPPORTED;
    uint32_t gpu = nvml_index(device);
    if (types == 0 || set->registered[gpu])
        return NVML_SUCCESS;
    set->registered[gpu] = true;
    set->next[gpu] = atomic_load(&device->xids_raised);
    return NVML_SUCCESS;
}

/* The next undelivered Xid of the set. A set that fell behind the ring continues with the oldest Xid in the ring. */
static bool take(nvmlEventSet_t set, uint32_t gpu, nvmlEventData_t *data) {
    struct simgpu_gpu *record = &simgpu_host()->gpus[gpu];
    if (!set->registered[gpu] || atomic_load(&record->xids_raised) == set->next[gpu] || !simgpu_lock())
        return false;
    uint32_t raised = atomic_load(&record->xids_raised);
    if (raised - set->next[gpu] > SIMGPU_XIDS_KEPT)
        set->next[gpu] = raised - SIMGPU_XIDS_KEPT;
    uint32_t xid = record->xids[set->next[gpu] % SIMGPU_XIDS_KEPT];
    simgpu_unlock();
    set->next[gpu]++;
    *data = (nvmlEventData_t){
        .device = record,
        .eventType = nvmlEventTypeXidCriticalError,
        .eventData = xid,
        .gpuInstanceId = NVML_NO_INSTANCE,
        .computeInstanceId = NVML_NO_INSTANCE,
    };
    return true;
}

static uint64_t now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms) {
    nvmlReturn_t result = nvml_enter("nvmlEventSetWait");
    if (result != NVML_SUCCESS)
        return result;
    if (set == NULL || data == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    struct simgpu_host *host = simgpu_host();
    uint64_t end = now_us() + (uint64_t)timeout_ms * 1000;
    for (;;) {
        bool lost = false;
        for (uint32_t gpu = 0; gpu < host->gpu_count; gpu++) {
            if (take(set, gpu, data))
                return NVML_SUCCESS;
            lost |= set->registered[gpu] && host->gpus[gpu].lost;
        }
        if (lost)
            return NVML_ERROR_GPU_IS_LOST;
        uint64_t now = now_us();
        if (now >= end)
            return NVML_ERROR_TIMEOUT;
        simgpu_sleep_us(end - now < POLL_US ? end - now : POLL_US);
    }
}

EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms) {
    return nvmlEventSetWait_v2(set, data, timeout_ms);
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    nvmlReturn_t result = nvml_enter("nvmlEventSetFree");
    if (result != NVML_SUCCESS)
        return result;
    free(set);
    return NVML_SUCCESS;
}
