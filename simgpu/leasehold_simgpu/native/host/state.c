#include "host/state.h"

#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "api/driver_types.h"
#include "host/process_table.h"
#include "host/waits.h"

/* flock() has no deadline, so the lock is polled. It is held for microseconds: long waits are rare. */
#define LOCK_POLL_US 50
#define LOCK_POLL_LONGEST_US 1600
#define LOCK_HOLDER_STOPPED_US 2000000

static pthread_mutex_t thread_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static struct simgpu_host *_Atomic mapped;
static int lock_file = -1;
static char host_directory[PATH_MAX], state_path[PATH_MAX];

/* A fork shares the open file, and with it the flock: the child drops its share, so that the parent's death
 * frees the lock, and opens the file anew. It also drops the mutexes, which threads left behind may hold. */
static void after_fork_in_child(void) {
    static const pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    thread_lock = fresh;
    open_lock = fresh;
    if (lock_file >= 0) {
        close(lock_file);
        lock_file = open(state_path, O_RDWR | O_CLOEXEC);
    }
}

bool simgpu_path(char *path, size_t size, const char *name) {
    return (size_t)snprintf(path, size, "%s/%s", host_directory, name) < size;
}

static struct simgpu_host *map_state(void) {
    const char *directory = getenv("LEASEHOLD_SIMGPU_DIR");
    if (directory == NULL || snprintf(host_directory, sizeof host_directory, "%s", directory) >= PATH_MAX ||
        !simgpu_path(state_path, sizeof state_path, "state"))
        return NULL;
    int file = open(state_path, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return NULL;
    struct stat facts;
    void *memory = MAP_FAILED;
    if (fstat(file, &facts) == 0 && facts.st_size == sizeof(struct simgpu_host))
        memory = mmap(NULL, sizeof(struct simgpu_host), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED) {
        close(file);
        return NULL;
    }
    struct simgpu_host *host = memory;
    if (host->magic != SIMGPU_MAGIC || host->layout_bytes != sizeof *host) {
        munmap(memory, sizeof *host);
        close(file);
        return NULL;
    }
    lock_file = file;
    pthread_atfork(NULL, NULL, after_fork_in_child);
    return host;
}

struct simgpu_host *simgpu_host(void) {
    struct simgpu_host *host = atomic_load(&mapped);
    if (host != NULL)
        return host;
    pthread_mutex_lock(&open_lock);
    host = atomic_load(&mapped);
    if (host == NULL) {
        host = map_state();
        atomic_store(&mapped, host);
    }
    pthread_mutex_unlock(&open_lock);
    return host;
}

bool simgpu_lock(void) {
    struct simgpu_host *host = atomic_load(&mapped);
    uint64_t poll_us = LOCK_POLL_US, stopped_us = 0;
    pthread_mutex_lock(&thread_lock);
    while (flock(lock_file, LOCK_EX | LOCK_NB) != 0) {
        pid_t holder = (pid_t)atomic_load(&host->lock_holder);
        stopped_us = process_is_stopped(holder) ? stopped_us + poll_us : 0;
        if (stopped_us > LOCK_HOLDER_STOPPED_US) {
            fprintf(stderr, "simgpu: process %d is stopped and holds the lock of the host: continue it (SIGCONT)\n",
                    (int)holder);
            pthread_mutex_unlock(&thread_lock);
            return false;
        }
        simgpu_sleep_us(poll_us);
        if (poll_us < LOCK_POLL_LONGEST_US)
            poll_us *= 2;
    }
    atomic_store(&host->lock_holder, (uint32_t)getpid());
    return true;
}

void simgpu_unlock(void) {
    atomic_store(&atomic_load(&mapped)->lock_holder, 0);
    flock(lock_file, LOCK_UN);
    pthread_mutex_unlock(&thread_lock);
}

uint32_t simgpu_gpu_of(const struct simgpu_process *process, uint32_t ordinal) {
    uint32_t row = (atomic_load(&process->status) & SIMGPU_PLACEMENT) ? 1 : 0;
    return process->placement[row][ordinal];
}

uint64_t simgpu_bytes_of(const struct simgpu_host *host, const struct simgpu_process *process, uint32_t ordinal) {
    return process->allocated_bytes[ordinal] + process->contexts[ordinal] * host->context_bytes;
}

bool simgpu_record_is_live(const struct simgpu_process *process) {
    return process->pid != 0 && process_has_restore_thread(process->pid, process->restore_tid);
}

bool simgpu_record_can_return(const struct simgpu_process *process) {
    uint32_t status = atomic_load(&process->status);
    return process->pid != 0 && (status & SIMGPU_STATE_MASK) == CU_PROCESS_STATE_CHECKPOINTED &&
           !(status & SIMGPU_RESIDENT);
}

uint64_t simgpu_used_bytes(struct simgpu_host *host, uint32_t gpu, const struct simgpu_process *except) {
    uint64_t used = host->gpus[gpu].hogged_bytes;
    for (uint32_t slot = 0; slot < SIMGPU_MAX_PROCESSES; slot++) {
        const struct simgpu_process *process = &host->processes[slot];
        if (process->pid == 0 || process == except || !(atomic_load(&process->status) & SIMGPU_RESIDENT))
            continue;
        uint64_t bytes = 0;
        for (uint32_t ordinal = 0; ordinal < process->visible_count; ordinal++)
            if (simgpu_gpu_of(process, ordinal) == gpu)
                bytes += simgpu_bytes_of(host, process, ordinal);
        if (bytes != 0 && simgpu_record_is_live(process))
            used += bytes;
    }
    return used;
}

void simgpu_set_status(struct simgpu_process *process, uint32_t status) {
    atomic_store(&process->status, status);
    simgpu_wake_word(&process->status);
}
