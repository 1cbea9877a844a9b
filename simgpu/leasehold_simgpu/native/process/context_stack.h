/* The contexts that are current in a thread. The newest one applies. */
#ifndef SIMGPU_CONTEXT_STACK_H
#define SIMGPU_CONTEXT_STACK_H

#include <stdbool.h>

#include "api/driver_types.h"

struct context {
    uint32_t ordinal;
    unsigned flags;
    unsigned references; /* of a primary context; 1 for any other */
    bool alive;
    bool primary;
    uint64_t id;
};

/* The current context of the calling thread, or NULL. */
struct context *context_stack_top(void);

bool context_stack_is_full(void);

/* Makes a context current. The stack must not be full. */
void context_stack_push(struct context *context);

/* Removes the current context. Returns it, or NULL if there is none. */
struct context *context_stack_pop(void);

/* The living context of this handle, or of the calling thread when NULL. */
CUresult simgpu_find_context(CUcontext handle, struct context **context);

#endif
