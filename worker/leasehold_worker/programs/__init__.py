"""Programs that the worker starts: their shim, their environment and their output."""
