"""Errors in building and controlling a simulated host."""

from __future__ import annotations


class SimgpuError(Exception):
    """The base of every error of this package. Its text has the problem, the reason and the remedy."""


class CompilerError(SimgpuError):
    """The two libraries could not be built: no C compiler, or the compiler failed."""


class NoSuchHostError(SimgpuError):
    """The directory holds no simulated host, or one made by another version."""


class HostLockedError(SimgpuError):
    """A process holds the lock of a simulated host and stays stopped."""


class InvalidSettingError(SimgpuError, ValueError):
    """An invalid value for a simulated host."""
