"""Leases: which workload holds which GPU, CPU, memory and disk."""
