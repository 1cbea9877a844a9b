/* cuGetProcAddress: the one symbol that cuda-python looks up by name. It asks for all others through it, by the name
 * without suffix and with the CUDA version whose form of the function it wants. */
#include <string.h>

#include "host/state.h"
#include "lookup/entry_points.h"

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
    (void)flags; /* they choose the per-thread default stream, which is like any other here */
    CUdriverProcAddressQueryResult found;
    if (name == NULL || function == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    const struct simgpu_host *host = simgpu_host();
    int newest = host == NULL ? version : (int)host->cuda_version;
    if (strcmp(name, "cuGetProcAddress") == 0) {
        *function = (void *)cuGetProcAddress_v2;
        found = CU_GET_PROC_ADDRESS_SUCCESS;
    } else {
        *function = entry_point_find(name, version < newest ? version : newest, &found);
    }
    if (status != NULL)
        *status = found;
    return *function == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
