"""``leasehold top``: the fleet on a terminal, live, with keys for operations."""
