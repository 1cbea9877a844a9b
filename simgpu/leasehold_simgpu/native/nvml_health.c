/* NVML's readings of memory repairs and slowdowns. Chips from Ampere on remap rows, and older chips retire pages. Each
 * answers NOT_SUPPORTED to queries of the other (NVIDIA GPU Memory Error Management, "Row Remapping"). */
#include "nvml.h"

#define AMPERE_COMPUTE_MAJOR 8
#define PAGE_BYTES 0x10000ull
#define RETIREMENT_TIME_US 1700000000000000ull /* of every page: nobody asks for more */

static bool remaps_rows(nvmlDevice_t device) {
    return device->compute_major >= AMPERE_COMPUTE_MAJOR;
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected,
                                              unsigned *pending, unsigned *failed) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetRemappedRows", device, corrected);
    if (result != NVML_SUCCESS)
        return result;
    if (!remaps_rows(device))
        return NVML_ERROR_NOT_SUPPORTED;
    if (uncorrected == NULL || pending == NULL || failed == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *corrected = device->remapped_rows_corrected;
    *uncorrected = device->remapped_rows_uncorrected;
    *pending = device->row_remap_pending;
    *failed = device->row_remap_failed;
    return NVML_SUCCESS;
}

/* The caller asks twice, as for processes. `times` is of version 2 only. */
static nvmlReturn_t list_pages(nvmlDevice_t device, int cause, unsigned *count, unsigned long long *addresses,
                               unsigned long long *times) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetRetiredPages", device, count);
    if (result != NVML_SUCCESS)
        return result;
    if (remaps_rows(device))
        return NVML_ERROR_NOT_SUPPORTED;
    if (cause != NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS &&
        cause != NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
        return NVML_ERROR_INVALID_ARGUMENT;
    bool double_bit = cause == NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR;
    unsigned room = addresses == NULL ? 0 : *count;
    unsigned found = double_bit ? device->retired_pages_double_bit : device->retired_pages_single_bit;
    unsigned skipped = double_bit ? device->retired_pages_single_bit : 0;
    for (unsigned page = 0; page < found && page < room; page++) {
        addresses[page] = (skipped + page) * PAGE_BYTES;
        if (times != NULL)
            times[page] = RETIREMENT_TIME_US;
    }
    *count = found;
    return found > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, int cause, unsigned *count,
                                              unsigned long long *addresses) {
    return list_pages(device, cause, count, addresses, NULL);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages_v2(nvmlDevice_t device, int cause, unsigned *count,
                                                 unsigned long long *addresses, unsigned long long *times) {
    return list_pages(device, cause, count, addresses, times);
}

EXPORT nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, unsigned *pending) {
    nvmlReturn_t result = nvml_enter_device("nvmlDeviceGetRetiredPagesPendingStatus", device, pending);
    if (result != NVML_SUCCESS)
        return result;
    if (remaps_rows(device))
        return NVML_ERROR_NOT_SUPPORTED;
    *pending = device->retired_pages_pending;
    return NVML_SUCCESS;
}

static nvmlReturn_t throttle_reasons(const char *call, nvmlDevice_t device, unsigned long long *reasons) {
    nvmlReturn_t result = nvml_enter_device(call, device, reasons);
    if (result == NVML_SUCCESS)
        *reasons = device->throttle_reasons;
    return result;
}

/* Came with driver 535. Faults of the two names are apart, so that one library can have the older one only. */
EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return throttle_reasons("nvmlDeviceGetCurrentClocksEventReasons", device, reasons);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return throttle_reasons("nvmlDeviceGetCurrentClocksThrottleReasons", device, reasons);
}
