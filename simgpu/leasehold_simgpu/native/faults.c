#include "faults.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "process_table.h"

#define HANG_POLL_US 20000

struct simgpu_fault simgpu_no_fault(void) {
    struct simgpu_fault none = {.state = SIMGPU_NO_STATE, .remaining = SIMGPU_UNLIMITED};
    return none;
}

void simgpu_sleep_us(uint64_t microseconds) {
    struct timespec left = {(time_t)(microseconds / 1000000), (long)(microseconds % 1000000) * 1000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

/* The active fault of a call. A fault with this pid precedes a fault without a pid, and an older fault precedes a newer
 * one. Faults that wait for later calls count this call. */
static struct simgpu_fault *find(struct simgpu_host *host, const char *call, pid_t pid) {
    struct simgpu_fault *best = NULL;
    for (int slot = 0; slot < SIMGPU_MAX_FAULTS; slot++) {
        struct simgpu_fault *fault = &host->faults[slot];
        if (fault->id == 0 || fault->remaining == 0 || strcmp(fault->call, call) != 0)
            continue;
        if (fault->pid != 0 && fault->pid != pid)
            continue;
        if (fault->after > 0) {
            fault->after--;
            continue;
        }
        bool better = best == NULL || (fault->pid != 0 && best->pid == 0) ||
                      ((fault->pid != 0) == (best->pid != 0) && fault->id < best->id);
        if (better)
            best = fault;
    }
    return best;
}

bool simgpu_meet_fault(const char *call, pid_t pid, struct simgpu_fault *met) {
    struct simgpu_host *host = simgpu_host();
    *met = simgpu_no_fault();
    if (host == NULL || atomic_load(&host->fault_count) == 0 || !simgpu_lock())
        return false;
    struct simgpu_fault *fault = find(host, call, pid);
    if (fault != NULL) {
        if (fault->remaining > 0)
            fault->remaining--;
        *met = *fault;
    }
    simgpu_unlock();
    if (fault == NULL)
        return false;
    simgpu_sleep_us((uint64_t)met->delay_ms * 1000);
    uint64_t start_time = process_start_time(pid); /* 0 once it has died of the signal */
    if (met->signal != 0 && met->signal_delay_ms == 0)
        kill(pid, met->signal);
    while (met->hang && start_time != 0 && *(volatile uint64_t *)&fault->id == met->id &&
           process_start_time(pid) == start_time)
        simgpu_sleep_us(HANG_POLL_US);
    return true;
}
