/* NVML's facts and readings of one device. */
#include "nvml/nvml.h"

#include <stdio.h>
#include <string.h>

#include "host/uuid_text.h"

static nvmlReturn_t copy_text(const char *call, nvmlDevice_t device, char *to, unsigned length, const char *text) {
    nvmlReturn_t result = nvml_enter_device(call, device, to);
    if (result != NVML_SUCCESS)
        return result;
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

NVML_NUMBER(nvmlDeviceGetPowerUsage, device->power_mw)
NVML_NUMBER(nvmlDeviceGetPowerManagementLimit, device->power_limit_mw)
NVML_NUMBER(nvmlDeviceGetEnforcedPowerLimit, device->power_limit_mw)
NVML_NUMBER(nvmlDeviceGetIndex, nvml_index(device))
NVML_NUMBER(nvmlDeviceGetMinorNumber, nvml_index(device))
NVML_NUMBER(nvmlDeviceGetPersistenceMode, simgpu_host()->persistence_mode)

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    char text[UUID_TEXT_SIZE];
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetUUID", device, uuid);
    if (result != NVML_SUCCESS)
        return result;
    if (length < sizeof text)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    uuid_to_text(device->uuid, text);
    memcpy(uuid, text, sizeof text);
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) {
    return copy_text("nvmlDeviceGetName", device, name, length, device->name);
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned length) {
    return copy_text("nvmlDeviceGetSerial", device, serial, length, device->serial);
}

static nvmlReturn_t used_bytes(nvmlDevice_t device, uint64_t *used) {
    if (!simgpu_lock())
        return NVML_ERROR_UNKNOWN;
    *used = simgpu_used_bytes(simgpu_host(), nvml_index(device), NULL);
    simgpu_unlock();
    if (*used > device->memory_bytes)
        *used = device->memory_bytes;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetMemoryInfo", device, memory);
    uint64_t used;
    if (result == NVML_SUCCESS)
        result = used_bytes(device, &used);
    if (result != NVML_SUCCESS)
        return result;
    *memory = (nvmlMemory_t){.total = device->memory_bytes, .free = device->memory_bytes - used, .used = used};
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetMemoryInfo", device, memory);
    if (result != NVML_SUCCESS)
        return result;
    if (memory->version != NVML_MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    uint64_t used;
    result = used_bytes(device, &used);
    if (result != NVML_SUCCESS)
        return result;
    memory->total = device->memory_bytes;
    memory->reserved = 0;
    memory->free = device->memory_bytes - used;
    memory->used = used;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetUtilizationRates", device, rates);
    if (result == NVML_SUCCESS)
        *rates = (nvmlUtilization_t){device->utilization_percent, device->memory_utilization_percent};
    return result;
}

#define SAMPLING_PERIOD_US 167000

#define CODEC_UTILIZATION(function, field)                                                        \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, unsigned *percent, unsigned *period_us) {   \
        nvmlReturn_t result = nvml_enter_device(#function, device, percent);                      \
        if (result != NVML_SUCCESS)                                                               \
            return result;                                                                        \
        *percent = device->field;                                                                 \
        *period_us = SAMPLING_PERIOD_US;                                                          \
        return NVML_SUCCESS;                                                                      \
    }

CODEC_UTILIZATION(nvmlDeviceGetEncoderUtilization, encoder_percent)
CODEC_UTILIZATION(nvmlDeviceGetDecoderUtilization, decoder_percent)

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned *celsius) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetTemperature", device, celsius);
    if (result != NVML_SUCCESS)
        return result;
    if (sensor != NVML_TEMPERATURE_GPU)
        return NVML_ERROR_INVALID_ARGUMENT;
    *celsius = device->temperature_c;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter,
                                                unsigned long long *count) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetTotalEccErrors", device, count);
    if (result != NVML_SUCCESS)
        return result;
    if (counter != NVML_VOLATILE_ECC && counter != NVML_AGGREGATE_ECC)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (type == NVML_MEMORY_ERROR_TYPE_CORRECTED)
        *count = device->ecc_corrected;
    else if (type == NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        *count = device->ecc_uncorrected;
    else
        return NVML_ERROR_INVALID_ARGUMENT;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetEccMode", device, current);
    if (result == NVML_SUCCESS)
        *current = *pending = 1;
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetMigMode", device, current);
    if (result == NVML_SUCCESS)
        *current = *pending = device->mig_enabled;
    return result;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetCudaComputeCapability", device, major);
    if (result != NVML_SUCCESS)
        return result;
    *major = (int)device->compute_major;
    *minor = (int)device->compute_minor;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetPciInfo", device, pci);
    if (result != NVML_SUCCESS)
        return result;
    memset(pci, 0, sizeof *pci);
    pci->domain = device->pci_domain;
    pci->bus = device->pci_bus;
    pci->device = device->pci_device;
    pci->pciDeviceId = device->pci_device_id;
    pci->pciSubSystemId = device->pci_device_id;
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", device->pci_domain & 0xffff,
             device->pci_bus & 0xff, device->pci_device & 0xff);
    snprintf(pci->busId, sizeof pci->busId, "%08X:%02X:%02X.0", device->pci_domain, device->pci_bus & 0xff,
             device->pci_device & 0xff);
    return NVML_SUCCESS;
}
