"""What can go wrong while a simulated host is built or controlled."""

from __future__ import annotations


class SimgpuError(Exception):
    """The base of every error of this package. Its text says what, why and what to do."""


class CompilerError(SimgpuError):
    """The two libraries could not be built: there is no C compiler, or it failed."""


class NoSuchHostError(SimgpuError):
    """The directory holds no simulated host, or one made by another version."""


class HostLockedError(SimgpuError):
    """A process was stopped while it held the lock of a simulated host, and does not go on."""


class InvalidSettingError(SimgpuError, ValueError):
    """A value that a simulated host cannot have."""
