"""The roles of callers."""

from enum import IntEnum, unique


@unique
class Role(IntEnum):
    """A role by its strength. Each role includes the weaker ones. Numbers as in ``leasehold.v1.Role``."""

    NONE = 0
    """No role: the caller only learns who it is."""
    VIEWER = 1
    USER = 2
    OPERATOR = 3
    ADMIN = 4
