#include "process/request_pipe.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

bool request_pipe_open(struct simgpu_process *record) {
    int ends[2]; /* both stay open: CRIU restores a pipe with the ends that it had */
    if (pipe2(ends, O_CLOEXEC) != 0)
        return false;
    record->request_pipe = ends[1];
    return true;
}

bool request_pipe_permits(const struct simgpu_process *target) {
    char path[48];
    /* of the thread: a process whose first thread has ended shows no descriptors under its own pid */
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)target->restore_tid, (int)target->request_pipe);
    int file = open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
    if (file >= 0)
        close(file);
    return file >= 0;
}
