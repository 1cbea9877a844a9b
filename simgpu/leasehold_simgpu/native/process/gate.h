/* The gate that every device call of a process passes.
 *
 * A caller first increments the count, then checks the gate, and decrements the count again if the gate is closed. A
 * lock first closes the gate, then waits until the count is 0. Both orders are sequentially consistent, so a lock never
 * misses a call. A waiter sleeps on the status word and uses no CPU.
 */
#ifndef SIMGPU_GATE_H
#define SIMGPU_GATE_H

#include "process/context_stack.h"

enum call_kind {
    NEEDS_NOTHING,  /* answers at any time */
    NEEDS_DRIVER,   /* needs cuInit; does not touch a GPU, so it answers while the process is locked too */
    NEEDS_GATE,     /* needs cuInit, and waits while the process is not RUNNING */
    NEEDS_CONTEXT,  /* as NEEDS_GATE, and a living current context on a GPU that is not lost */
};

/* Starts a driver call: applies its faults, waits at the gate and finds the current context (`context` may be NULL).
 * Every NEEDS_GATE or NEEDS_CONTEXT call that began with CUDA_SUCCESS must end with simgpu_leave(). */
CUresult simgpu_enter(const char *call, enum call_kind kind, struct context **context);

/* Ends a call that passed the gate, so that a lock may proceed. Returns `result`. */
CUresult simgpu_leave(CUresult result);

#endif
