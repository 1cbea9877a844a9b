"""``leasehold demo``: a demonstration on simulated GPUs that checks itself."""
