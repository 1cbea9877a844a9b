"""Commands of the coordinator: each is executed once, in order, and survives a crash of the worker."""
