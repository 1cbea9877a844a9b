/* The bytes of the simulated GPUs.
 *
 * The physical memory of a GPU is a set of sparse files in the directory of the host: `memory/GPU-SLOT`, one per
 * memory slot (memory_slots.h). A physical address is a slot and an offset in its file. Device memory is not mapped
 * into any process: copies and fills read and write these files. So a suspended process holds no mapping and no
 * descriptor of a GPU, and a process that reads a device address on the CPU gets SIGSEGV, as with a real GPU.
 */
#ifndef SIMGPU_DEVICE_MEMORY_H
#define SIMGPU_DEVICE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DEVICE_MEMORY_PAGE_BYTES 4096u

/* The value of device memory that is on no GPU, or that was not written since its allocation or release. Holes in the
 * files stand for such memory, so poison takes no space. */
#define DEVICE_MEMORY_POISON 0xdb

/* An open slot of a GPU. */
struct device_memory {
    int file; /* -1: slot 0, which is on no GPU */
};

/* Opens a slot, and creates a missing file. Must end with device_memory_close(). False: see errno. */
bool device_memory_open(struct device_memory *memory, uint32_t gpu, uint32_t slot);
void device_memory_close(struct device_memory *memory);

/* Writes to slot 0 are lost. False: see errno. */
bool device_memory_read(const struct device_memory *memory, uint64_t offset, void *to, size_t bytes);
bool device_memory_write(const struct device_memory *memory, uint64_t offset, const void *from, size_t bytes);

/* Finds the first written bytes between `*start` and `end`, and stores their range in `*start` and `*stop`. If there
 * are none, both are `end`. False: see errno. */
bool device_memory_find_data(const struct device_memory *memory, uint64_t end, uint64_t *start, uint64_t *stop);

/* Releases the pages of an allocation, which are poison from then on. False: some keep their values, see errno. */
bool device_memory_erase(uint32_t gpu, uint32_t slot, uint64_t offset, uint64_t bytes);

/* Removes the files of unused slots. */
void device_memory_erase_slots(bool (*has_owner)(uint32_t gpu, uint32_t slot));

#endif
