"""GPUs as NVML reports them: facts, use and health."""
