/* Queries of tools like gpustat and nvitop whose answers are the same for all simulated boards: passive data-centre
 * boards on Linux, without a display. */
#include "nvml/nvml.h"

#include <stdio.h>
#include <string.h>

NVML_NUMBER(nvmlDeviceGetComputeMode, NVML_COMPUTEMODE_DEFAULT)
NVML_NUMBER(nvmlDeviceGetDisplayActive, NVML_FEATURE_DISABLED)
NVML_NUMBER(nvmlDeviceGetDisplayMode, NVML_FEATURE_DISABLED)
NVML_NUMBER(nvmlDeviceGetPerformanceState, NVML_PSTATE_0)
NVML_NUMBER(nvmlDeviceIsMigDeviceHandle, 0)
NVML_NUMBER(nvmlDeviceGetNumFans, 0)

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, int counter, unsigned *kb_per_s) {
    (void)counter;
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetPcieThroughput", device, kb_per_s);
    if (result == NVML_SUCCESS)
        *kb_per_s = 0;
    return result;
}

#define PCI_BASE_CLASS_DISPLAY 0x03
#define PCI_SUBCLASS_3D 0x02

EXPORT nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *pci) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetPciInfo", device, pci);
    if (result != NVML_SUCCESS)
        return result;
    if (pci->version != NVML_PCI_INFO_EXT_V1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    pci->domain = device->pci_domain;
    pci->bus = device->pci_bus;
    pci->device = device->pci_device;
    pci->pciDeviceId = device->pci_device_id;
    pci->pciSubSystemId = device->pci_device_id;
    pci->baseClass = PCI_BASE_CLASS_DISPLAY;
    pci->subClass = PCI_SUBCLASS_3D;
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", device->pci_domain, device->pci_bus & 0xff,
             device->pci_device & 0xff);
    return NVML_SUCCESS;
}

/* Turing has compute capability 7.5, Ada 8.9; each other architecture has a major number of its own. */
static unsigned architecture(const struct simgpu_gpu *gpu) {
    switch (gpu->compute_major) {
    case 7:
        return NVML_DEVICE_ARCH_TURING;
    case 8:
        return gpu->compute_minor == 9 ? NVML_DEVICE_ARCH_ADA : NVML_DEVICE_ARCH_AMPERE;
    case 9:
        return NVML_DEVICE_ARCH_HOPPER;
    case 10:
        return NVML_DEVICE_ARCH_BLACKWELL;
    default:
        return NVML_DEVICE_ARCH_UNKNOWN;
    }
}

NVML_NUMBER(nvmlDeviceGetArchitecture, architecture(device))

/* The brand is the first word of the name: "Tesla T4", "NVIDIA H100 80GB HBM3". */
NVML_NUMBER(nvmlDeviceGetBrand, strncmp(device->name, "Tesla", 5) == 0 ? NVML_BRAND_TESLA : NVML_BRAND_NVIDIA)

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *temperature) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetTemperature", device, temperature);
    if (result != NVML_SUCCESS)
        return result;
    if (temperature->version != NVML_TEMPERATURE_V1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (temperature->sensorType != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    temperature->temperature = (int)device->temperature_c;
    return NVML_SUCCESS;
}

/* No process draws. */
EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, void *infos) {
    (void)infos;
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetGraphicsRunningProcesses", device, count);
    if (result == NVML_SUCCESS)
        *count = 0;
    return result;
}

/* There are no samples of what single processes do. */
EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, void *samples, unsigned *count,
                                                    unsigned long long last_seen) {
    (void)samples;
    (void)last_seen;
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetProcessUtilization", device, count);
    return result != NVML_SUCCESS ? result : NVML_ERROR_NOT_FOUND;
}

/* As "r580_00". The real name does not follow from the number: driver 580.159.04 says "r582_49". */
EXPORT nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_v1_t *info, unsigned length) {
    nvmlReturn_t result = nvml_enter("nvmlSystemGetDriverBranch");
    if (result != NVML_SUCCESS)
        return result;
    if (info == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (info->version != NVML_SYSTEM_DRIVER_BRANCH_INFO_V1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    const char *version = simgpu_host()->driver_version;
    char branch[sizeof info->branch];
    int written = snprintf(branch, sizeof branch, "r%.*s_00", (int)strcspn(version, "."), version);
    if (written < 0 || (unsigned)written >= length || length > sizeof info->branch)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(info->branch, branch, (size_t)written + 1);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned length) {
    nvmlReturn_t result = nvml_enter("nvmlSystemGetProcessName");
    if (result != NVML_SUCCESS)
        return result;
    if (name == NULL || length == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    char path[32];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (file == NULL)
        return NVML_ERROR_NOT_FOUND;
    name[fread(name, 1, length - 1, file)] = '\0'; /* a NUL ends the first argument */
    fclose(file);
    return NVML_SUCCESS;
}
