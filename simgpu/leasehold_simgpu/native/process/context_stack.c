#include "process/context_stack.h"

#define STACK_DEPTH 64

static _Thread_local struct context *stack[STACK_DEPTH];
static _Thread_local unsigned depth;

struct context *context_stack_top(void) {
    return depth > 0 ? stack[depth - 1] : NULL;
}

bool context_stack_is_full(void) {
    return depth == STACK_DEPTH;
}

void context_stack_push(struct context *context) {
    stack[depth++] = context;
}

struct context *context_stack_pop(void) {
    return depth > 0 ? stack[--depth] : NULL;
}

CUresult simgpu_find_context(CUcontext handle, struct context **context) {
    struct context *found = handle != NULL ? handle : context_stack_top();
    if (found == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!found->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *context = found;
    return CUDA_SUCCESS;
}
