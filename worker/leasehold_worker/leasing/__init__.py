"""Leases and reservations of GPUs, CPU, memory and disk by workloads."""
