"""The CUDA driver's checkpoint calls, made by helper processes."""
