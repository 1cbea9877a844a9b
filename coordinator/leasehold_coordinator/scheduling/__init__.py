"""The choice of a worker and GPUs for a workload. Pure."""
