/* What a target has or uses that keeps calls on it from succeeding. */
#ifndef SIMGPU_TARGET_MARKS_H
#define SIMGPU_TARGET_MARKS_H

#include "checkpoint_channel.h"

/* The first reason why the target cannot be checkpointed, or CUDA_SUCCESS. Does not return while the target has a
 * multicast group. */
CUresult checkpoint_obstacle(const struct channel *channel);

/* Is a peer of the target not RUNNING? Then no call on the target returns. */
bool peer_is_suspended(const struct channel *channel);

#endif
