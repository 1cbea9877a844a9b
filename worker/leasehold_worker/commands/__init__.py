"""Commands of the coordinator: each is carried out once, in order, and survives a crash of the worker."""
