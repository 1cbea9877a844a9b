/* The thread of a process that serves controllers: it copies device memory out and in.
 *
 * A controller writes a request into the record of the process and waits until the thread has served it. The thread
 * alone moves bytes and changes the state, so a controller that is killed in a call leaves the process as it was or as
 * the call would have left it. A process that is stopped serves nothing until it goes on.
 */
#ifndef SIMGPU_RESTORE_THREAD_H
#define SIMGPU_RESTORE_THREAD_H

#include "state.h"

/* Starts the thread and writes its id into the record, which must be filled else, except its pid. */
bool restore_thread_start(struct simgpu_process *record);

#endif
