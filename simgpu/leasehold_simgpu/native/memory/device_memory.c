#include "memory/device_memory.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "host/state.h"

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

bool device_memory_find_data(const struct device_memory *memory, uint64_t end, uint64_t *start, uint64_t *stop) {
    off_t data = memory->file < 0 ? (off_t)end : lseek(memory->file, (off_t)*start, SEEK_DATA);
    if (data < 0 && errno != ENXIO) /* ENXIO: only a hole follows */
        return false;
    *start = *stop = end;
    if (data < 0 || (uint64_t)data >= end)
        return true;
    off_t hole = lseek(memory->file, data, SEEK_HOLE);
    if (hole < 0)
        return false;
    *start = (uint64_t)data;
    if ((uint64_t)hole < end)
        *stop = (uint64_t)hole;
    return true;
}

static bool read_data(int file, uint64_t offset, char *to, size_t bytes) {
    while (bytes > 0) {
        ssize_t done = pread(file, to, bytes, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return false;
        if (done == 0) { /* behind the last byte that was written */
            memset(to, DEVICE_MEMORY_POISON, bytes);
            return true;
        }
        to += done;
        offset += (uint64_t)done;
        bytes -= (size_t)done;
    }
    return true;
}

bool device_memory_read(const struct device_memory *memory, uint64_t offset, void *to, size_t bytes) {
    char *next = to;
    uint64_t end = offset + bytes;
    while (offset < end) {
        uint64_t start = offset, stop;
        if (!device_memory_find_data(memory, end, &start, &stop))
            return false;
        memset(next, DEVICE_MEMORY_POISON, start - offset);
        if (!read_data(memory->file, start, next + (start - offset), stop - start))
            return false;
        next += stop - offset;
        offset = stop;
    }
    return true;
}

static bool write_data(int file, uint64_t offset, const char *from, size_t bytes) {
    while (bytes > 0) {
        ssize_t done = pwrite(file, from, bytes, (off_t)offset);
        if (done < 0 && errno == EINTR)
            continue;
        if (done < 0)
            return false;
        from += done;
        offset += (uint64_t)done;
        bytes -= (size_t)done;
    }
    return true;
}

/* Fills the page of an offset with poison if it is a hole: a write of a part would turn the rest into zeros. */
static bool prepare_page(const struct device_memory *memory, uint64_t offset) {
    char poison[DEVICE_MEMORY_PAGE_BYTES];
    uint64_t page = offset - offset % sizeof poison, start = page, stop;
    if (offset == page)
        return true;
    if (!device_memory_find_data(memory, page + sizeof poison, &start, &stop))
        return false;
    if (start != stop)
        return true;
    memset(poison, DEVICE_MEMORY_POISON, sizeof poison);
    return write_data(memory->file, page, poison, sizeof poison);
}

bool device_memory_write(const struct device_memory *memory, uint64_t offset, const void *from, size_t bytes) {
    static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER; /* threads may write to parts of one page */
    if (memory->file < 0)
        return true;
    pthread_mutex_lock(&turn);
    bool done = prepare_page(memory, offset) && prepare_page(memory, offset + bytes) &&
                write_data(memory->file, offset, from, bytes);
    pthread_mutex_unlock(&turn);
    return done;
}

/* For file systems that can't make holes. */
static bool overwrite(const struct device_memory *memory, uint64_t offset, uint64_t end) {
    char poison[DEVICE_MEMORY_PAGE_BYTES];
    memset(poison, DEVICE_MEMORY_POISON, sizeof poison);
    uint64_t stop;
    for (; offset < end; offset = stop) {
        if (!device_memory_find_data(memory, end, &offset, &stop))
            return false;
        for (uint64_t at = offset; at < stop; at += sizeof poison)
            if (!write_data(memory->file, at, poison, stop - at < sizeof poison ? stop - at : sizeof poison))
                return false;
    }
    return true;
}

bool device_memory_erase(uint32_t gpu, uint32_t slot, uint64_t offset, uint64_t bytes) {
    char path[PATH_MAX];
    bytes += (DEVICE_MEMORY_PAGE_BYTES - bytes % DEVICE_MEMORY_PAGE_BYTES) % DEVICE_MEMORY_PAGE_BYTES;
    if (slot == 0)
        return true;
    if (!slot_path(path, gpu, slot))
        return false;
    struct device_memory memory = {.file = open(path, O_RDWR | O_CLOEXEC)};
    if (memory.file < 0)
        return errno == ENOENT; /* nothing was ever written */
    bool done = fallocate(memory.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes) == 0 ||
                overwrite(&memory, offset, offset + bytes);
    device_memory_close(&memory);
    return done;
}

void device_memory_erase_slots(bool (*has_owner)(uint32_t gpu, uint32_t slot)) {
    char path[PATH_MAX];
    DIR *folder = simgpu_path(path, sizeof path, "memory") ? opendir(path) : NULL;
    const struct dirent *entry;
    uint32_t gpu, slot;
    while (folder != NULL && (entry = readdir(folder)) != NULL)
        if (sscanf(entry->d_name, "%" SCNu32 "-%" SCNu32, &gpu, &slot) == 2 && !has_owner(gpu, slot) &&
            slot_path(path, gpu, slot))
            unlink(path);
    if (folder != NULL)
        closedir(folder);
}
