/* Functions that exist and answer NOT_SUPPORTED, as NVML does for readings that a GPU lacks. Tools call them for every
 * GPU and then show nothing. A missing function would look like an old driver. */
#include "nvml.h"

#define UNSUPPORTED(X)                 \
    X(nvmlDeviceGetBAR1MemoryInfo)     \
    X(nvmlDeviceGetClockInfo)          \
    X(nvmlDeviceGetConfComputeMemSizeInfo) \
    X(nvmlDeviceGetDriverModel)        \
    X(nvmlDeviceGetDriverModel_v2)     \
    X(nvmlDeviceGetFanSpeed)           \
    X(nvmlDeviceGetFanSpeed_v2)        \
    X(nvmlDeviceGetFieldValues)        \
    X(nvmlDeviceGetMaxClockInfo)       \
    X(nvmlDeviceGetMaxMigDeviceCount)  \
    X(nvmlDeviceGetNvLinkState)        \
    X(nvmlDeviceGetNvLinkVersion)      \
    X(nvmlDeviceGetRunningProcessDetailList)

/* Whatever else they take stays unread. */
#define DEFINE(function)                                                            \
    EXPORT nvmlReturn_t function(nvmlDevice_t device) {                             \
        nvmlReturn_t result = nvml_enter_device(#function, device, simgpu_host());  \
        return result != NVML_SUCCESS ? result : NVML_ERROR_NOT_SUPPORTED;          \
    }
UNSUPPORTED(DEFINE)
