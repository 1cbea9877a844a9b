"""``leasehold demo``: a demonstration on simulated GPUs that verifies its own results."""
