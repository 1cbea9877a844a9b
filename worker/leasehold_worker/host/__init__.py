"""Linux: processes, control groups and capacity."""
