#include "process/restore_thread.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "host/process_table.h"
#include "host/waits.h"
#include "process/delayed_death.h"
#include "process/residence.h"

#define RESTORE_THREAD_STACK_BYTES 65536

static _Atomic int restore_tid;

static CUresult serve(struct simgpu_process *self, uint32_t request) {
    switch (request) {
    case SIMGPU_ANSWER:
        simgpu_sleep_us(self->request_us);
        return CUDA_SUCCESS;
    case SIMGPU_EVICT:
        simgpu_sleep_us(self->request_us);
        return residence_evict(self);
    case SIMGPU_PLACE:
        return residence_place(self);
    case SIMGPU_DIE:
        simgpu_die(self);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* Another process may get the record while this process is in an image (state.h). The thread then serves no request. */
static void *restore_thread(void *record) {
    struct simgpu_process *self = record;
    uint64_t id = self->id;
    atomic_store(&restore_tid, (int)syscall(SYS_gettid));
    for (;;) {
        uint32_t request = atomic_load(&self->request);
        if (request == SIMGPU_NO_REQUEST || self->id != id) {
            simgpu_wait_word(&self->request, request, UINT_MAX);
            continue;
        }
        self->request_result = serve(self, request);
        atomic_store(&self->request, SIMGPU_NO_REQUEST);
        simgpu_wake_word(&self->request);
    }
    return NULL;
}

bool restore_thread_start(struct simgpu_process *record) {
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, RESTORE_THREAD_STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the program's signals are not this thread's business */
    int failed = pthread_create(&thread, &attributes, restore_thread, record);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed)
        return false;
    char name[16];
    restore_thread_name(getpid(), name);
    pthread_setname_np(thread, name);
    while (atomic_load(&restore_tid) == 0)
        simgpu_sleep_us(50);
    record->restore_tid = atomic_load(&restore_tid);
    return true;
}
