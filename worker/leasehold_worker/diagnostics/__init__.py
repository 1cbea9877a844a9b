"""``leasehold doctor`` and ``leasehold validate``."""
