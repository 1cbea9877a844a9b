/* The channel from a controller to a target process: the begin and the end of every checkpoint call. */
#ifndef SIMGPU_CHECKPOINT_CHANNEL_H
#define SIMGPU_CHECKPOINT_CHANNEL_H

#include "api/driver_types.h"
#include "host/faults.h"
#include "host/state.h"

struct channel {
    struct simgpu_host *host;
    struct simgpu_process *target;
    pid_t pid; /* of the target's process, also when the caller named one of its threads */
    uint64_t start_time;
    struct simgpu_fault fault;
    CUresult result; /* of a call that channel_open() ended */
};

/* Finds the target, counts the call, waits for its channel and applies the call's faults. If false, the call ends with
 * `channel->result`. Otherwise it must end with channel_close(). */
bool channel_open(struct channel *channel, enum simgpu_checkpoint_call call, int pid);

/* Ends the call. CUDA_ERROR_OPERATING_SYSTEM if the target died in it. */
CUresult channel_close(struct channel *channel, CUresult result);

/* Sends a request to the target's restore thread (restore_thread.h), and waits until the thread has served the request,
 * which takes this time. SIMGPU_PLACE needs the map of the GPUs. */
CUresult channel_ask(const struct channel *channel, enum simgpu_request request, uint64_t time_us,
                     const uint8_t *new_of);

/* Whether the record still belongs to the target. A record is reused after the end of its process. */
bool channel_owns_record(const struct channel *channel);

bool channel_target_lives(const struct channel *channel);

#endif
