/* Every function that cuGetProcAddress answers: X(name asked for, CUDA version that brought it, function). */
#ifndef SIMGPU_ENTRY_POINTS_H
#define SIMGPU_ENTRY_POINTS_H

#include "api/driver_types.h"

#define ENTRY_POINTS(X)                                                                    \
    X(cuGetErrorName, 6000, cuGetErrorName)                                                \
    X(cuGetErrorString, 6000, cuGetErrorString)                                            \
    X(cuGetExportTable, 3000, cuGetExportTable)                                            \
    X(cuInit, 2000, cuInit)                                                                \
    X(cuDriverGetVersion, 2020, cuDriverGetVersion)                                        \
    X(cuDeviceGet, 2000, cuDeviceGet)                                                      \
    X(cuDeviceGetCount, 2000, cuDeviceGetCount)                                            \
    X(cuDeviceGetName, 2000, cuDeviceGetName)                                              \
    X(cuDeviceGetUuid, 9020, cuDeviceGetUuid)                                              \
    X(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2)                                          \
    X(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)                                         \
    X(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)                                    \
    X(cuDeviceComputeCapability, 2000, cuDeviceComputeCapability)                          \
    X(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId)                                      \
    X(cuDeviceGetByPCIBusId, 4010, cuDeviceGetByPCIBusId)                                  \
    X(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer)                                  \
    X(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)                            \
    X(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2)                      \
    X(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2)                          \
    X(cuDevicePrimaryCtxSetFlags, 11000, cuDevicePrimaryCtxSetFlags_v2)                    \
    X(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState)                        \
    X(cuCtxCreate, 3020, cuCtxCreate_v2)                                                   \
    X(cuCtxCreate, 12050, cuCtxCreate_v4)                                                  \
    X(cuCtxDestroy, 4000, cuCtxDestroy_v2)                                                 \
    X(cuCtxSetCurrent, 4000, cuCtxSetCurrent)                                              \
    X(cuCtxGetCurrent, 4000, cuCtxGetCurrent)                                              \
    X(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)                                         \
    X(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)                                           \
    X(cuCtxGetDevice, 2000, cuCtxGetDevice)                                                \
    X(cuCtxGetDevice, 13000, cuCtxGetDevice_v2)                                            \
    X(cuCtxGetFlags, 7000, cuCtxGetFlags)                                                  \
    X(cuCtxGetId, 12000, cuCtxGetId)                                                       \
    X(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion)                                        \
    X(cuCtxSynchronize, 2000, cuCtxSynchronize)                                            \
    X(cuCtxSynchronize, 13000, cuCtxSynchronize_v2)                                        \
    X(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange)                      \
    X(cuMemAlloc, 3020, cuMemAlloc_v2)                                                     \
    X(cuMemFree, 3020, cuMemFree_v2)                                                       \
    X(cuMemGetInfo, 3020, cuMemGetInfo_v2)                                                 \
    X(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2)                                 \
    X(cuMemAllocHost, 3020, cuMemAllocHost_v2)                                             \
    X(cuMemHostAlloc, 2020, cuMemHostAlloc)                                                \
    X(cuMemFreeHost, 2000, cuMemFreeHost)                                                  \
    X(cuPointerGetAttribute, 4000, cuPointerGetAttribute)                                  \
    X(cuPointerGetAttributes, 7000, cuPointerGetAttributes)                                \
    X(cuMemcpy, 4000, cuMemcpy)                                                            \
    X(cuMemcpyAsync, 4000, cuMemcpyAsync)                                                  \
    X(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2)                                                 \
    X(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)                                                 \
    X(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2)                                                 \
    X(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2)                                       \
    X(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)                                       \
    X(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2)                                       \
    X(cuMemsetD8, 3020, cuMemsetD8_v2)                                                     \
    X(cuMemsetD16, 3020, cuMemsetD16_v2)                                                   \
    X(cuMemsetD32, 3020, cuMemsetD32_v2)                                                   \
    X(cuMemsetD8Async, 3020, cuMemsetD8Async)                                              \
    X(cuMemsetD16Async, 3020, cuMemsetD16Async)                                            \
    X(cuMemsetD32Async, 3020, cuMemsetD32Async)                                            \
    X(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool)                         \
    X(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool)                                       \
    X(cuDeviceSetMemPool, 11020, cuDeviceSetMemPool)                                       \
    X(cuMemPoolCreate, 11020, cuMemPoolCreate)                                             \
    X(cuMemPoolDestroy, 11020, cuMemPoolDestroy)                                           \
    X(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo)                                             \
    X(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute)                                 \
    X(cuMemPoolGetAccess, 11020, cuMemPoolGetAccess)                                       \
    X(cuMemPoolSetAccess, 11020, cuMemPoolSetAccess)                                       \
    X(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute)                                 \
    X(cuMemAllocAsync, 11020, cuMemAllocAsync)                                             \
    X(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync)                             \
    X(cuMemFreeAsync, 11020, cuMemFreeAsync)                                               \
    X(cuStreamCreate, 2000, cuStreamCreate)                                                \
    X(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority)                        \
    X(cuStreamDestroy, 4000, cuStreamDestroy_v2)                                           \
    X(cuStreamSynchronize, 2000, cuStreamSynchronize)                                      \
    X(cuStreamQuery, 2000, cuStreamQuery)                                                  \
    X(cuStreamWaitEvent, 3020, cuStreamWaitEvent)                                          \
    X(cuStreamGetFlags, 5050, cuStreamGetFlags)                                            \
    X(cuStreamGetPriority, 5050, cuStreamGetPriority)                                      \
    X(cuStreamGetId, 12000, cuStreamGetId)                                                 \
    X(cuStreamGetCtx, 9020, cuStreamGetCtx)                                                \
    X(cuStreamGetCtx, 12050, cuStreamGetCtx_v2)                                            \
    X(cuStreamGetDevice, 12080, cuStreamGetDevice)                                         \
    X(cuStreamIsCapturing, 10000, cuStreamIsCapturing)                                     \
    X(cuLaunchHostFunc, 10000, cuLaunchHostFunc)                                           \
    X(cuEventCreate, 2000, cuEventCreate)                                                  \
    X(cuEventDestroy, 4000, cuEventDestroy_v2)                                             \
    X(cuEventRecord, 2000, cuEventRecord)                                                  \
    X(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags)                               \
    X(cuEventQuery, 2000, cuEventQuery)                                                    \
    X(cuEventSynchronize, 2000, cuEventSynchronize)                                        \
    X(cuEventElapsedTime, 12080, cuEventElapsedTime_v2)                                    \
    X(cuCheckpointProcessGetState, 12080, cuCheckpointProcessGetState)                     \
    X(cuCheckpointProcessGetRestoreThreadId, 12080, cuCheckpointProcessGetRestoreThreadId) \
    X(cuCheckpointProcessLock, 12080, cuCheckpointProcessLock)                             \
    X(cuCheckpointProcessCheckpoint, 12080, cuCheckpointProcessCheckpoint)                 \
    X(cuCheckpointProcessRestore, 12080, cuCheckpointProcessRestore)                       \
    X(cuCheckpointProcessUnlock, 12080, cuCheckpointProcessUnlock)

/* The newest form of a function that is no newer than `version`: NULL, and why in `status`, if there is none. */
void *entry_point_find(const char *name, int version, CUdriverProcAddressQueryResult *status);

#endif
