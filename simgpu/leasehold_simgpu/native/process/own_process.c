#include "process/own_process.h"

struct simgpu_process *simgpu_self;
uint64_t simgpu_record_id;
pthread_mutex_t simgpu_objects = PTHREAD_MUTEX_INITIALIZER;
