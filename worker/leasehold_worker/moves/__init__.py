"""Moves: how the members of workloads leave their GPUs and come back."""
