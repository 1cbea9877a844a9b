/* The pipe of a process whose kernel permissions decide who may call the checkpoint API on the process.
 *
 * The real driver's controller opens pipes of its target as /proc/PID/fd/N (seen on 580.159.04). So the kernel demands
 * two permissions of the calling thread: ptrace access to the target, and write access to the pipe. The kernel gives
 * the pipe mode 0600 and the fsuid that the target had at cuInit. No byte goes through the pipe here.
 */
#ifndef SIMGPU_REQUEST_PIPE_H
#define SIMGPU_REQUEST_PIPE_H

#include "host/state.h"

/* Makes the pipe of this process, and writes the descriptor of its write end into the record. False if the process has
 * too many open files. */
bool request_pipe_open(struct simgpu_process *record);

/* Whether the kernel lets the calling thread open the pipe of a process. */
bool request_pipe_permits(const struct simgpu_process *target);

#endif
