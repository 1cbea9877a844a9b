/* The simulated host: one memory-mapped file that every process on it shares.
 *
 * leasehold_simgpu/layout.py states the same layout for Python, and a test compares the two field by field.
 *
 * Any process may be killed at any instruction. So the file lock is a flock, which the kernel releases at the end of a
 * process. A process record counts only while a process with its pid AND its restore thread live. Each change of a
 * process's state is one store of one word, `status`, so that no reader sees half of a change.
 *
 * CRIU may write a CHECKPOINTED process to disk, end it, and restore it later. So its record stays after its end, and
 * is reused only if no other record is free.
 */
#ifndef SIMGPU_STATE_H
#define SIMGPU_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define SIMGPU_MAGIC 0x55504753u /* "SGPU" */
#define SIMGPU_MAX_GPUS 16
#define SIMGPU_MAX_PROCESSES 256
#define SIMGPU_MAX_FAULTS 64
#define SIMGPU_XIDS_KEPT 32
#define SIMGPU_NO_STATE (-1)
#define SIMGPU_UNLIMITED (-1)

struct simgpu_gpu {
    uint8_t uuid[16];
    char name[64]; /* two GPUs are of the same chip when their names are equal */
    char serial[32];
    uint64_t memory_bytes;
    uint64_t hogged_bytes; /* memory taken by something that is not a process of this host */
    uint64_t ecc_corrected;
    uint64_t ecc_uncorrected;
    uint64_t throttle_reasons; /* bits of nvmlClocksEventReasons */
    uint32_t pci_domain;
    uint32_t pci_bus;
    uint32_t pci_device;
    uint32_t pci_device_id;
    uint32_t compute_major;
    uint32_t compute_minor;
    uint32_t multiprocessors;
    uint32_t lost;
    uint32_t mig_enabled;
    uint32_t temperature_c;
    uint32_t utilization_percent;
    uint32_t memory_utilization_percent;
    uint32_t encoder_percent;
    uint32_t decoder_percent;
    uint32_t power_mw;
    uint32_t power_limit_mw;
    uint32_t hides_process_memory; /* NVML cannot say what a process takes */
    uint32_t remapped_rows_corrected;
    uint32_t remapped_rows_uncorrected;
    uint32_t row_remap_pending;
    uint32_t row_remap_failed;
    uint32_t retired_pages_single_bit;
    uint32_t retired_pages_double_bit;
    uint32_t retired_pages_pending;
    uint32_t xids[SIMGPU_XIDS_KEPT]; /* the newest ones: number n is in place n modulo SIMGPU_XIDS_KEPT */
    _Atomic uint32_t xids_raised;    /* grows; whoever raises one writes it first, under the lock */
};

/* A fault of a call. `pid` is the target of a checkpoint call, or the caller of another call. 0 stands for every
 * process. */
struct simgpu_fault {
    uint64_t id;   /* 0: the slot is free */
    char call[56]; /* without version suffix: cuMemAlloc, nvmlDeviceGetCount */
    int32_t pid;
    int32_t error;
    uint32_t delay_ms;
    uint32_t hang;             /* the call returns only once the fault is cleared */
    int32_t signal;            /* sent to `pid`'s process */
    uint32_t signal_delay_ms;  /* the call returns first; the signal comes so much later. For checkpoint calls only */
    int32_t state;             /* CUprocessState forced after the call, or SIMGPU_NO_STATE */
    uint32_t skip;             /* do nothing, yet return `error` (which may be success) */
    uint32_t keep_memory;      /* a checkpoint that leaves the memory on the GPU */
    uint32_t ignore_gpu_pairs; /* a restore that leaves the process where it was */
    int32_t remaining;         /* calls left, or SIMGPU_UNLIMITED */
    uint32_t after;            /* matching calls that still pass before it holds */
};

/* Bits of simgpu_process.status, beside the CUprocessState in its low bits. */
#define SIMGPU_STATE_MASK 0x7u
#define SIMGPU_RESIDENT 0x08u    /* its memory is on the GPUs */
#define SIMGPU_WEDGED 0x10u      /* a restore failed in a way after which nothing helps */
#define SIMGPU_GATE_CLOSED 0x20u /* device calls of the process wait */
#define SIMGPU_PLACEMENT 0x40u   /* which of the two `placement` rows holds */

/* The calls of the checkpoint API. */
enum simgpu_checkpoint_call {
    SIMGPU_GET_STATE,
    SIMGPU_GET_RESTORE_THREAD_ID,
    SIMGPU_LOCK,
    SIMGPU_CHECKPOINT,
    SIMGPU_RESTORE,
    SIMGPU_UNLOCK,
    SIMGPU_CHECKPOINT_CALLS, /* how many there are */
};

/* What a controller asks of the restore thread of its target (restore_thread.h). */
enum simgpu_request {
    SIMGPU_NO_REQUEST,
    SIMGPU_EVICT, /* copy device memory to host memory: LOCKED becomes CHECKPOINTED */
    SIMGPU_PLACE, /* copy it to the GPUs of `destination`: CHECKPOINTED becomes LOCKED */
    SIMGPU_DIE,   /* end the process: see delayed_death.h. Never set back */
    SIMGPU_ANSWER, /* nothing but an answer, after the time of a copy */
};

struct simgpu_process {
    int32_t pid; /* 0: the slot is free */
    int32_t restore_tid;
    int32_t request_pipe; /* a file descriptor of the process: see request_pipe.h */
    uint64_t start_time; /* /proc/PID/stat field 22, in clock ticks after boot, as the last controller read it */
    uint64_t id;         /* of no other record, ever: a process knows its own by it, whoever was given the slot since */
    _Atomic uint32_t status;
    _Atomic uint32_t in_flight; /* device calls that are running now */
    _Atomic uint32_t busy;      /* set from outside: submitted work that never drains */
    int32_t channel_pid;        /* the controller whose checkpoint call is running, or 0 */
    uint64_t channel_start_time;
    uint32_t visible_count;
    uint32_t mps_client;          /* set from outside, as the next five: see target_marks.c */
    uint32_t multicast;
    uint32_t partial_passthrough;
    uint32_t profiler;
    uint32_t ipc_importer;
    uint32_t peer_group;          /* 0: it has no peers */
    uint32_t death_delay_ms;
    uint32_t death_signal;
    uint8_t placement[2][SIMGPU_MAX_GPUS]; /* CUDA ordinal -> index of the GPU it is on */
    uint64_t allocated_bytes[SIMGPU_MAX_GPUS]; /* by CUDA ordinal */
    uint32_t contexts[SIMGPU_MAX_GPUS];        /* by CUDA ordinal */
    _Atomic uint32_t calls[SIMGPU_CHECKPOINT_CALLS]; /* that came for this process, whatever they were answered */
    _Atomic uint32_t request; /* enum simgpu_request; the restore thread sets it back when it has served it */
    uint32_t request_result;  /* a CUresult */
    uint64_t request_us;      /* the time that a copy takes, in microseconds */
    uint8_t destination[SIMGPU_MAX_GPUS];    /* of SIMGPU_PLACE: index of a GPU -> index of the GPU it becomes */
    uint16_t memory_slots[SIMGPU_MAX_GPUS];  /* by CUDA ordinal: see memory_slots.h; 0: no bytes are on a GPU */
    uint64_t workload;                       /* the same number in processes of one workload: memory_slots.h */
};

struct simgpu_host {
    uint32_t magic;
    uint32_t layout_bytes; /* sizeof(struct simgpu_host) */
    uint32_t gpu_count;
    uint32_t cuda_version; /* 13000 is CUDA 13.0 */
    char driver_version[32];
    uint32_t persistence_mode;
    uint32_t exclusive_memory; /* see memory_slots.h */
    uint64_t context_bytes; /* memory that every context takes on its GPU */
    uint64_t suspend_fixed_us;
    uint64_t suspend_bytes_per_s; /* 0: no time per byte */
    uint64_t restore_fixed_us;
    uint64_t restore_bytes_per_s;
    uint64_t next_fault_id;
    uint64_t next_record_id;
    _Atomic uint32_t fault_count; /* 0 lets every call skip the search */
    _Atomic uint32_t lock_holder; /* the pid of the process that has the lock, or 0 */
    struct simgpu_gpu gpus[SIMGPU_MAX_GPUS];
    struct simgpu_fault faults[SIMGPU_MAX_FAULTS];
    struct simgpu_process processes[SIMGPU_MAX_PROCESSES];
};

/* The host named by LEASEHOLD_SIMGPU_DIR, mapped on first use; NULL if there is none. */
struct simgpu_host *simgpu_host(void);

/* The path of a file in the directory of the host. False if it is too long. */
bool simgpu_path(char *path, size_t size, const char *name);

/* The lock over everything except `status`, `in_flight`, `busy`, `calls` and the request. Not recursive. Held for
 * microseconds. False, with a line on standard error: a process holds the lock and stays stopped. A real driver has no
 * such lock, so others must not hang. */
__attribute__((warn_unused_result)) bool simgpu_lock(void);
void simgpu_unlock(void);

/* The GPU that the CUDA device `ordinal` of the process is on now. */
uint32_t simgpu_gpu_of(const struct simgpu_process *process, uint32_t ordinal);

/* The bytes of a process on its GPU `ordinal`. For a process that is not resident: the bytes that it would take. */
uint64_t simgpu_bytes_of(const struct simgpu_host *host, const struct simgpu_process *process, uint32_t ordinal);

/* The bytes taken on a GPU by living resident processes other than `except` (may be NULL), and hogged. Under the
 * lock. */
uint64_t simgpu_used_bytes(struct simgpu_host *host, uint32_t gpu, const struct simgpu_process *except);

/* Whether the process of this record lives with its driver. An exec keeps the pid, but ends the restore thread. CRIU
 * restores pid and threads, with a new start time, and in a time namespace that shifts all start times. So the thread
 * decides, and not the start time. */
bool simgpu_record_is_live(const struct simgpu_process *process);

/* Whether the process of this record may have ended with an image, so that the record is kept for its restore. */
bool simgpu_record_can_return(const struct simgpu_process *process);

/* Stores a new status and wakes everyone who waits for one. */
void simgpu_set_status(struct simgpu_process *process, uint32_t status);

#endif
