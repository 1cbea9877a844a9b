#include "device_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "state.h"

static bool slot_path(char path[PATH_MAX], uint32_t gpu, uint32_t slot) {
    char name[48];
    snprintf(name, sizeof name, "memory/%u-%u", gpu, slot);
    errno = ENAMETOOLONG;
    return simgpu_path(path, PATH_MAX, name);
}

bool device_memory_open(struct device_memory *memory, uint32_t gpu, uint32_t slot) {
    char path[PATH_MAX];
    memory->file = -1;
    if (slot == 0)
        return true;
    if (!slot_path(path, gpu, slot))
        return false;
    memory->file = open(path, O_RDWR | O_CLOEXEC);
    if (memory->file < 0 && errno == ENOENT) {
        memory->file = open(path, O_RDWR | O_CLOEXEC | O_CREAT, 0666);
        if (memory->file >= 0)
            (void)fchmod(memory->file, 0666); /* any user may write: undo the umask */
    }
    return memory->file >= 0;
}

void device_memory_close(struct device_memory *memory) {
    if (memory->file >= 0)
        close(memory->file);
}

bool device_memory_read(const struct device_memory *memory, uint64_t offset, void *to, size_t bytes) {
    char *next = to;
    if (memory->file < 0) {
        memset(to, DEVICE_MEMORY_POISON, bytes);
        return true;
    }
    while (bytes > 0) {
        ssize_t done = pread(memory->file, next, bytes, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return false;
        if (done == 0) { /* behind the last byte that was written */
            memset(next, 0, bytes);
            return true;
        }
        next += done;
        offset += (uint64_t)done;
        bytes -= (size_t)done;
    }
    return true;
}

bool device_memory_write(const struct device_memory *memory, uint64_t offset, const void *from, size_t bytes) {
    const char *next = from;
    while (bytes > 0 && memory->file >= 0) {
        ssize_t done = pwrite(memory->file, next, bytes, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return false;
        next += done;
        offset += (uint64_t)done;
        bytes -= (size_t)done;
    }
    return true;
}

bool device_memory_find_data(const struct device_memory *memory, uint64_t end, uint64_t *start, uint64_t *stop) {
    off_t data = memory->file < 0 ? -1 : lseek(memory->file, (off_t)*start, SEEK_DATA);
    if (data < 0 || (uint64_t)data >= end)
        return false;
    off_t hole = lseek(memory->file, data, SEEK_HOLE);
    *start = (uint64_t)data;
    *stop = hole < 0 || (uint64_t)hole > end ? end : (uint64_t)hole;
    return true;
}

void device_memory_erase(uint32_t gpu, uint32_t slot, uint64_t offset, uint64_t bytes) {
    char path[PATH_MAX];
    int file = slot != 0 && slot_path(path, gpu, slot) ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    (void)fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
    close(file);
}

void device_memory_erase_slot(uint32_t gpu, uint32_t slot) {
    char path[PATH_MAX];
    if (slot != 0 && slot_path(path, gpu, slot))
        unlink(path);
}
