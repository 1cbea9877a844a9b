"""The agent that runs on every GPU host: it leases GPUs, and suspends, restores and moves processes."""

__version__ = "0.1.0"
