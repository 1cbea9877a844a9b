"""The gRPC services: requests are checked, and errors become statuses, here and nowhere else."""
