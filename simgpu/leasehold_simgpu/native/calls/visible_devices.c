/* CUDA_VISIBLE_DEVICES: indices, or unique prefixes of UUIDs, but not both. By the CUDA programming guide, only the
 * devices before the first invalid entry are visible. An index is read like atoi does. A second valid entry for one GPU
 * is an error. Both were seen on driver 580.159.04. */
#include "calls/visible_devices.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "host/uuid_text.h"

/* "0x1", "0.5" and "-0" are 0, and 4294967296 is 0 too. An entry without digits is invalid. */
static int by_index(const struct simgpu_host *host, const char *entry) {
    char *end;
    int index = (int)strtol(entry, &end, 10);
    return end != entry && index >= 0 && index < (int)host->gpu_count ? index : -1;
}

static int by_uuid(const struct simgpu_host *host, const char *entry) {
    int found = -1;
    for (uint32_t gpu = 0; gpu < host->gpu_count; gpu++) {
        char text[UUID_TEXT_SIZE];
        uuid_to_text(host->gpus[gpu].uuid, text);
        if (strncasecmp(text, entry, strlen(entry)) != 0)
            continue;
        if (found >= 0)
            return -1;
        found = (int)gpu;
    }
    return found;
}

static bool names_uuid(const char *entry) {
    return strncasecmp(entry, "GPU-", 4) == 0;
}

CUresult visible_devices(const struct simgpu_host *host, const char *list, uint8_t gpus[SIMGPU_MAX_GPUS],
                         uint32_t *count) {
    *count = 0;
    if (list == NULL) {
        for (; *count < host->gpu_count; ++*count)
            gpus[*count] = (uint8_t)*count;
        return *count == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
    }
    char copy[2048], *rest = copy, *entry;
    snprintf(copy, sizeof copy, "%s", list);
    bool uuids = false;
    while ((entry = strsep(&rest, ",")) != NULL) { /* unlike strtok, strsep returns empty entries */
        while (isspace((unsigned char)*entry))
            entry++;
        for (size_t length = strlen(entry); length > 0 && isspace((unsigned char)entry[length - 1]); length--)
            entry[length - 1] = '\0';
        if (*count == 0)
            uuids = names_uuid(entry);
        int gpu = uuids != names_uuid(entry) ? -1 : uuids ? by_uuid(host, entry) : by_index(host, entry);
        if (gpu < 0)
            break;
        if (memchr(gpus, gpu, *count) != NULL)
            return CUDA_ERROR_INVALID_DEVICE;
        gpus[(*count)++] = (uint8_t)gpu;
    }
    return *count == 0 ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}
