"""Workloads: their states, eviction policies and processes."""
