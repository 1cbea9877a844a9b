"""Hooks: programs, requests and signals before and after an operation on a workload."""
