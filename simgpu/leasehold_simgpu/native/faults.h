/* Faults that are injected from outside: see struct simgpu_fault. */
#ifndef SIMGPU_FAULTS_H
#define SIMGPU_FAULTS_H

#include <stdbool.h>
#include <sys/types.h>

#include "state.h"

/* Finds the fault of a call, counts it down, and executes its delay, hang and signal. The caller applies the other
 * fields. Returns false and an empty fault if there is none. */
bool simgpu_meet_fault(const char *call, pid_t pid, struct simgpu_fault *met);

/* A fault that changes nothing. */
struct simgpu_fault simgpu_no_fault(void);

void simgpu_sleep_us(uint64_t microseconds);

#endif
