/* The process that this library is loaded in. */
#ifndef SIMGPU_OWN_PROCESS_H
#define SIMGPU_OWN_PROCESS_H

#include <pthread.h>

#include "host/state.h"

/* The record of this process on the host; NULL before cuInit, and in a child forked after it. */
extern struct simgpu_process *simgpu_self;

/* Its id. After a restore from an image, the record may belong to another process. */
extern uint64_t simgpu_record_id;

/* Guards the objects of this process: contexts, allocations, pools. Taken before simgpu_lock(). */
extern pthread_mutex_t simgpu_objects;

#endif
