/* The thread of a process that serves controllers: it copies device memory out and in.
 *
 * A controller writes a request into the record of the process and waits until the thread has served it. The thread
 * moves the bytes and changes the state, and spends the time of the copy. So if a controller is killed in a checkpoint
 * or a restore, the target finishes the call, and the next call waits until then (seen on driver 580.159.04). A stopped
 * or frozen process serves nothing until it continues.
 */
#ifndef SIMGPU_RESTORE_THREAD_H
#define SIMGPU_RESTORE_THREAD_H

#include "host/state.h"

/* Starts the thread and writes its id into the record. All other fields except the pid must be set before. */
bool restore_thread_start(struct simgpu_process *record);

#endif
