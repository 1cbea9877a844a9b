"""Suspending and restoring CUDA processes with the driver's checkpoint API."""
