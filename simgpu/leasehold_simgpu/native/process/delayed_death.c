#include "process/delayed_death.h"

#include <signal.h>
#include <unistd.h>

#include "host/waits.h"

void simgpu_doom(struct simgpu_process *process, const struct simgpu_fault *fault) {
    process->death_delay_ms = fault->signal_delay_ms;
    process->death_signal = (uint32_t)fault->signal;
    simgpu_set_status(process, atomic_load(&process->status) | SIMGPU_GATE_CLOSED);
    atomic_store(&process->request, SIMGPU_DIE);
    simgpu_wake_word(&process->request);
}

bool simgpu_is_doomed(const struct simgpu_process *process) {
    return atomic_load(&process->request) == SIMGPU_DIE;
}

_Noreturn void simgpu_die(const struct simgpu_process *self) {
    simgpu_sleep_us((uint64_t)self->death_delay_ms * 1000);
    kill(getpid(), (int)self->death_signal);
    for (;;)
        pause(); /* the program may have a handler for the signal */
}
