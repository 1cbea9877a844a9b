#include "lookup/entry_points.h"

#include <string.h>

/* How the functions are declared where they are defined does not matter here: only their addresses do. */
#define DECLARE(name, version, function) void function(void);
ENTRY_POINTS(DECLARE)
#undef DECLARE

struct entry_point {
    const char *name;
    int version;
    void (*function)(void);
};

static const struct entry_point entry_points[] = {
#define AS_ENTRY(name, version, function) {#name, version, function},
    ENTRY_POINTS(AS_ENTRY)
#undef AS_ENTRY
};

void *entry_point_find(const char *name, int version, CUdriverProcAddressQueryResult *status) {
    const struct entry_point *best = NULL;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    for (size_t index = 0; index < sizeof entry_points / sizeof *entry_points; index++) {
        const struct entry_point *entry = &entry_points[index];
        if (strcmp(entry->name, name) != 0)
            continue;
        if (entry->version > version)
            *status = best == NULL ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : *status;
        else if (best == NULL || entry->version > best->version)
            best = entry;
    }
    if (best == NULL)
        return NULL;
    *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return (void *)best->function;
}
