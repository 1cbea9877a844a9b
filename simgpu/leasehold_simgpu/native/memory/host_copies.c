#include "memory/host_copies.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "memory/device_memory.h"

/* Copies one run of bytes. */
static struct host_copy *make_copy(const struct device_memory *memory, uint64_t start, uint64_t stop) {
    struct host_copy *copy = malloc(sizeof *copy);
    if (copy == NULL)
        return NULL;
    *copy = (struct host_copy){.offset = start, .bytes = stop - start};
    copy->memory = mmap(NULL, copy->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy->memory != MAP_FAILED && device_memory_read(memory, start, copy->memory, copy->bytes))
        return copy;
    if (copy->memory != MAP_FAILED)
        munmap(copy->memory, copy->bytes);
    free(copy);
    return NULL;
}

bool host_copies_make(struct host_copy **copies, uint32_t gpu, uint32_t slot, uint64_t offset, uint64_t bytes) {
    struct device_memory memory;
    if (!device_memory_open(&memory, gpu, slot))
        return false;
    uint64_t start = offset, end = offset + bytes, stop;
    bool done;
    while ((done = device_memory_find_data(&memory, end, &start, &stop)) && start != stop) {
        struct host_copy *copy = make_copy(&memory, start, stop);
        done = copy != NULL;
        if (!done)
            break;
        copy->next = *copies;
        *copies = copy;
        start = stop;
    }
    device_memory_close(&memory);
    return done;
}

bool host_copies_write(const struct host_copy *copies, uint32_t gpu, uint32_t slot) {
    struct device_memory memory;
    if (copies == NULL)
        return true;
    if (!device_memory_open(&memory, gpu, slot))
        return false;
    bool done = true;
    for (; done && copies != NULL; copies = copies->next)
        done = device_memory_write(&memory, copies->offset, copies->memory, copies->bytes);
    device_memory_close(&memory);
    return done;
}

void host_copies_drop(struct host_copy **copies) {
    while (*copies != NULL) {
        struct host_copy *copy = *copies;
        *copies = copy->next;
        munmap(copy->memory, copy->bytes);
        free(copy);
    }
}
