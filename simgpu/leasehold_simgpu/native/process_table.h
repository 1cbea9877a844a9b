/* Facts of /proc about live processes. */
#ifndef SIMGPU_PROCESS_TABLE_H
#define SIMGPU_PROCESS_TABLE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* The start time of a process in clock ticks after boot, or 0 if there is none or it is a zombie. */
uint64_t process_start_time(pid_t pid);

/* Whether a signal or a tracer has stopped the process, so that none of its threads can answer. */
bool process_is_stopped(pid_t pid);

/* The name of the thread through which a process's driver answers: "cuda" and 11 hex digits. */
void restore_thread_name(pid_t pid, char name[16]);

/* Whether this thread of the process has that name. */
bool process_has_restore_thread(pid_t pid, pid_t tid);

/* The process that a thread id belongs to (its own for a process id), or 0 if there is none. */
pid_t process_of_thread(pid_t tid);

#endif
