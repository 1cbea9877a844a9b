/* CUDA_VISIBLE_DEVICES: indices, or unique prefixes of UUIDs. By the CUDA programming guide, only the devices before
 * the first invalid entry are visible. A repeated entry counts as invalid. */
#include "visible_devices.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "uuid_text.h"

static int by_index(const struct simgpu_host *host, const char *entry) {
    char *end;
    long index = strtol(entry, &end, 10);
    return *end == '\0' && index >= 0 && index < (long)host->gpu_count ? (int)index : -1;
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

uint32_t visible_devices(const struct simgpu_host *host, const char *list, uint8_t gpus[SIMGPU_MAX_GPUS]) {
    uint32_t count = 0;
    if (list == NULL) {
        for (; count < host->gpu_count; count++)
            gpus[count] = (uint8_t)count;
        return count;
    }
    char copy[2048];
    snprintf(copy, sizeof copy, "%s", list);
    char *rest = NULL;
    for (char *entry = strtok_r(copy, ",", &rest); entry != NULL; entry = strtok_r(NULL, ",", &rest)) {
        while (isspace((unsigned char)*entry))
            entry++;
        for (size_t length = strlen(entry); length > 0 && isspace((unsigned char)entry[length - 1]); length--)
            entry[length - 1] = '\0';
        int gpu = strncasecmp(entry, "GPU-", 4) == 0 ? by_uuid(host, entry) : by_index(host, entry);
        if (gpu < 0 || *entry == '\0' || memchr(gpus, gpu, count) != NULL)
            break;
        gpus[count++] = (uint8_t)gpu;
    }
    return count;
}
