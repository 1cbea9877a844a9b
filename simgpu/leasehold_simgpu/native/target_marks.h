/* Properties of a target that make calls on it fail or hang. */
#ifndef SIMGPU_TARGET_MARKS_H
#define SIMGPU_TARGET_MARKS_H

#include "checkpoint_channel.h"

/* The first reason why the target cannot be checkpointed, or CUDA_SUCCESS. Does not return while the target has a
 * multicast group. */
CUresult checkpoint_obstacle(const struct channel *channel);

/* Whether a peer of the target is not RUNNING. No call on the target returns then. */
bool peer_is_suspended(const struct channel *channel);

#endif
