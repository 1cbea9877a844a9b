/* The thread of a process that serves controllers: it copies device memory out and in.
 *
 * A controller writes a request into the record of the process and waits until the thread has served it. Only the
 * thread moves bytes and changes the state. So if a controller is killed in a call, the process is as before or as
 * after the call. A stopped process serves nothing until it continues.
 */
#ifndef SIMGPU_RESTORE_THREAD_H
#define SIMGPU_RESTORE_THREAD_H

#include "state.h"

/* Starts the thread and writes its id into the record. All other fields except the pid must be set before. */
bool restore_thread_start(struct simgpu_process *record);

#endif
