/* cuInit: registers a process with the host. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "calls/visible_devices.h"
#include "host/process_table.h"
#include "memory/memory_slots.h"
#include "process/gate.h"
#include "process/own_process.h"
#include "process/request_pipe.h"
#include "process/restore_thread.h"

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static bool forked_after_init;

/* A child forked after cuInit has no CUDA: the driver's threads and channels stayed with the parent. */
static void forget_in_child(void) {
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    init_lock = fresh;
    simgpu_objects = fresh;
    forked_after_init = forked_after_init || simgpu_self != NULL;
    simgpu_self = NULL;
}

/* A free record, or one of an ended process. If only processes remain that may return from an image, the record of the
 * oldest one. Under the lock. */
static struct simgpu_process *free_record(struct simgpu_host *host) {
    struct simgpu_process *oldest = NULL;
    for (int slot = 0; slot < SIMGPU_MAX_PROCESSES; slot++) {
        struct simgpu_process *record = &host->processes[slot];
        if (simgpu_record_is_live(record))
            continue;
        if (!simgpu_record_can_return(record))
            return record;
        if (oldest == NULL || record->id < oldest->id)
            oldest = record;
    }
    return oldest;
}

/* Frees records with this pid. Their processes cannot return while the pid is in use. Under the lock. */
static void forget_namesakes(struct simgpu_host *host) {
    for (int slot = 0; slot < SIMGPU_MAX_PROCESSES; slot++)
        if (host->processes[slot].pid == getpid())
            host->processes[slot].pid = 0;
}

static CUresult register_process(struct simgpu_host *host) {
    uint8_t gpus[SIMGPU_MAX_GPUS];
    uint32_t count;
    CUresult result = visible_devices(host, getenv("CUDA_VISIBLE_DEVICES"), gpus, &count);
    if (result != CUDA_SUCCESS)
        return result;
    if (!simgpu_lock())
        return CUDA_ERROR_OPERATING_SYSTEM;
    forget_namesakes(host);
    memory_slots_reclaim();
    struct simgpu_process *record = free_record(host);
    if (record != NULL) {
        memset(record, 0, sizeof *record);
        record->id = simgpu_record_id = ++host->next_record_id;
        record->workload = memory_slots_workload();
        record->start_time = process_start_time(getpid());
        record->visible_count = count;
        memcpy(record->placement[0], gpus, count);
        atomic_store(&record->status, CU_PROCESS_STATE_RUNNING | SIMGPU_RESIDENT);
        if (request_pipe_open(record) && restore_thread_start(record)) {
            record->pid = getpid(); /* last: from here on the record counts */
            simgpu_self = record;
        }
    }
    simgpu_unlock();
    return simgpu_self == NULL ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

EXPORT CUresult cuInit(unsigned int flags) {
    CUresult result = simgpu_enter("cuInit", NEEDS_NOTHING, NULL);
    if (result != CUDA_SUCCESS)
        return result;
    if (flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct simgpu_host *host = simgpu_host();
    if (host == NULL)
        return CUDA_ERROR_NO_DEVICE;
    pthread_mutex_lock(&init_lock);
    if (forked_after_init) {
        result = CUDA_ERROR_NOT_INITIALIZED;
    } else if (simgpu_self == NULL) {
        pthread_atfork(NULL, NULL, forget_in_child);
        result = register_process(host);
    }
    pthread_mutex_unlock(&init_lock);
    return result;
}

EXPORT CUresult cuDriverGetVersion(int *version) {
    struct simgpu_host *host = simgpu_host();
    if (version == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *version = host == NULL ? 0 : (int)host->cuda_version;
    return host == NULL ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
