/* The processes that compute on a device. A process is listed while it has a context there and its memory is on the
 * GPU: so while LOCKED, but not while CHECKPOINTED (NVIDIA/cuda-checkpoint README and issue 31). */
#include "nvml/nvml.h"

static uint64_t bytes_on(const struct simgpu_host *host, const struct simgpu_process *process, uint32_t gpu) {
    uint64_t bytes = 0;
    for (uint32_t ordinal = 0; ordinal < process->visible_count; ordinal++)
        if (simgpu_gpu_of(process, ordinal) == gpu)
            bytes += simgpu_bytes_of(host, process, ordinal);
    return bytes;
}

static bool has_context_on(const struct simgpu_process *process, uint32_t gpu) {
    for (uint32_t ordinal = 0; ordinal < process->visible_count; ordinal++)
        if (simgpu_gpu_of(process, ordinal) == gpu && process->contexts[ordinal] > 0)
            return true;
    return false;
}

/* The caller asks twice: with no room, to learn the number (INSUFFICIENT_SIZE), and with room for so many. */
static nvmlReturn_t list_processes(nvmlDevice_t device, bool only_mps, unsigned *count, nvmlProcessInfo_t *infos) {
    struct simgpu_host *host = simgpu_host();
    uint32_t gpu = nvml_index(device), room = infos == NULL ? 0 : *count, found = 0;
    if (!simgpu_lock())
        return NVML_ERROR_UNKNOWN;
    for (int slot = 0; slot < SIMGPU_MAX_PROCESSES; slot++) {
        const struct simgpu_process *process = &host->processes[slot];
        if (process->pid == 0 || !(atomic_load(&process->status) & SIMGPU_RESIDENT))
            continue;
        if (only_mps && !process->mps_client)
            continue;
        if (!has_context_on(process, gpu) || !simgpu_record_is_live(process))
            continue;
        if (found < room)
            infos[found] = (nvmlProcessInfo_t){
                .pid = (unsigned)process->pid,
                .usedGpuMemory =
                    device->hides_process_memory ? NVML_VALUE_NOT_AVAILABLE : bytes_on(host, process, gpu),
                .gpuInstanceId = NVML_NO_INSTANCE,
                .computeInstanceId = NVML_NO_INSTANCE,
            };
        found++;
    }
    simgpu_unlock();
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                            nvmlProcessInfo_t *infos) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetComputeRunningProcesses", device, count);
    return result != NVML_SUCCESS ? result : list_processes(device, false, count, infos);
}

/* A client of MPS is in both lists, as nvidia-smi shows it: its type there is "M+C". */
EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                               nvmlProcessInfo_t *infos) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetMPSComputeRunningProcesses", device, count);
    return result != NVML_SUCCESS ? result : list_processes(device, true, count, infos);
}
