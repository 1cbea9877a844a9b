"""The worker process: settings, assembly, start, recovery and end."""
