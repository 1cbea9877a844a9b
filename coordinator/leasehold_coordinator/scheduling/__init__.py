"""Which worker and which GPUs suit a workload. Pure."""
