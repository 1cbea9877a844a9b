"""What is called in or for a workload around suspend and restore."""
