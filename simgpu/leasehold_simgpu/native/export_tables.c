/* cuGetExportTable returns tables of private functions for the CUDA runtime and NVIDIA's own tools. NVIDIA documents
 * none, so simgpu has none. Without the line below, the runtime would only report a driver that is too old. */
#include <stdatomic.h>
#include <stdio.h>

#include "driver_types.h"

static atomic_flag said;

EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id) {
    if (table == NULL || id == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *table = NULL;
    if (!atomic_flag_test_and_set(&said))
        fputs("simgpu: the CUDA runtime API is not simulated, as it needs private tables of the driver "
              "(cuGetExportTable): use the driver API\n",
              stderr);
    return CUDA_ERROR_NOT_SUPPORTED;
}
