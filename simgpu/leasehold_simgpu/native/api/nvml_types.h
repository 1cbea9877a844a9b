/* The types and values of the NVML API that simgpu speaks, stated from the NVML API reference. A test reads them
 * back through nvidia-ml-py. */
#ifndef SIMGPU_NVML_TYPES_H
#define SIMGPU_NVML_TYPES_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

#define NVML_ERRORS(X)                                                        \
    X(NVML_SUCCESS, 0, "Success")                                             \
    X(NVML_ERROR_UNINITIALIZED, 1, "Uninitialized")                           \
    X(NVML_ERROR_INVALID_ARGUMENT, 2, "Invalid Argument")                     \
    X(NVML_ERROR_NOT_SUPPORTED, 3, "Not Supported")                           \
    X(NVML_ERROR_NO_PERMISSION, 4, "Insufficient Permissions")                \
    X(NVML_ERROR_NOT_FOUND, 6, "Not Found")                                   \
    X(NVML_ERROR_INSUFFICIENT_SIZE, 7, "Insufficient Size")                   \
    X(NVML_ERROR_DRIVER_NOT_LOADED, 9, "Driver Not Loaded")                   \
    X(NVML_ERROR_TIMEOUT, 10, "Timeout")                                      \
    X(NVML_ERROR_FUNCTION_NOT_FOUND, 13, "Function Not Found")                \
    X(NVML_ERROR_GPU_IS_LOST, 15, "GPU is lost")                              \
    X(NVML_ERROR_RESET_REQUIRED, 16, "GPU requires restart")                  \
    X(NVML_ERROR_IN_USE, 19, "In use by another client")                      \
    X(NVML_ERROR_MEMORY, 20, "Insufficient Memory")                           \
    X(NVML_ERROR_ARGUMENT_VERSION_MISMATCH, 25, "API version mismatch")       \
    X(NVML_ERROR_UNKNOWN, 999, "Unknown Error")

typedef enum {
#define AS_VALUE(name, value, text) name = value,
    NVML_ERRORS(AS_VALUE)
#undef AS_VALUE
} nvmlReturn_t;

typedef struct simgpu_gpu *nvmlDevice_t;

typedef struct {
    unsigned long long total;
    unsigned long long free;
    unsigned long long used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total;
    unsigned long long reserved;
    unsigned long long free;
    unsigned long long used;
} nvmlMemory_v2_t;

#define NVML_MEMORY_V2 (sizeof(nvmlMemory_v2_t) | 2u << 24)

typedef struct {
    unsigned int gpu;
    unsigned int memory;
} nvmlUtilization_t;

typedef struct {
    unsigned int version;
    int sensorType;
    int temperature;
} nvmlTemperature_v1_t;

#define NVML_TEMPERATURE_V1 (sizeof(nvmlTemperature_v1_t) | 1u << 24)

typedef struct {
    unsigned int version;
    char branch[80];
} nvmlSystemDriverBranchInfo_v1_t;

#define NVML_SYSTEM_DRIVER_BRANCH_INFO_V1 (sizeof(nvmlSystemDriverBranchInfo_v1_t) | 1u << 24)

typedef struct {
    char busIdLegacy[16];
    unsigned int domain;
    unsigned int bus;
    unsigned int device;
    unsigned int pciDeviceId;
    unsigned int pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned int version;
    unsigned int domain;
    unsigned int bus;
    unsigned int device;
    unsigned int pciDeviceId;
    unsigned int pciSubSystemId;
    unsigned int baseClass;
    unsigned int subClass;
    char busId[32];
} nvmlPciInfoExt_v1_t;

#define NVML_PCI_INFO_EXT_V1 (sizeof(nvmlPciInfoExt_v1_t) | 1u << 24)

typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId;
    unsigned int computeInstanceId;
} nvmlProcessInfo_t;

typedef struct nvml_event_set *nvmlEventSet_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType;
    unsigned long long eventData; /* the Xid */
    unsigned int gpuInstanceId;
    unsigned int computeInstanceId;
} nvmlEventData_t;

enum { NVML_TEMPERATURE_GPU = 0 };
enum { NVML_MEMORY_ERROR_TYPE_CORRECTED = 0, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1 };
enum { NVML_VOLATILE_ECC = 0, NVML_AGGREGATE_ECC = 1 };

enum {
    NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS = 0,
    NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
};
enum { nvmlEventTypeXidCriticalError = 8 };
enum { NVML_FEATURE_DISABLED = 0 };
enum { NVML_COMPUTEMODE_DEFAULT = 0 };
enum { NVML_PSTATE_0 = 0 };
enum { NVML_BRAND_TESLA = 2, NVML_BRAND_NVIDIA = 14 };
enum {
    NVML_DEVICE_ARCH_TURING = 6,
    NVML_DEVICE_ARCH_AMPERE = 7,
    NVML_DEVICE_ARCH_ADA = 8,
    NVML_DEVICE_ARCH_HOPPER = 9,
    NVML_DEVICE_ARCH_BLACKWELL = 10,
};
#define NVML_DEVICE_ARCH_UNKNOWN 0xffffffffu

#define NVML_NO_INSTANCE 0xffffffffu /* not on a MIG instance */
#define NVML_VALUE_NOT_AVAILABLE (-1ull)

#endif
