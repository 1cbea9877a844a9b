"""Operations on workloads: run, suspend, restore, remap, stop, kill, adopt and preempt."""
