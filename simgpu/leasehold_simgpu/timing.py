"""How long a simulated checkpoint and restore take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """A fixed time and a bandwidth for each direction. The bandwidth applies to the process's allocations."""

    suspend_fixed_s: float
    """Seconds of a checkpoint, independent of the size of the process."""
    suspend_bytes_per_s: float
    """Bandwidth from the GPU to host memory. 0: no time per byte."""
    restore_fixed_s: float
    restore_bytes_per_s: float

    @classmethod
    def instant(cls) -> Timing:
        """No time, for tests."""
        return cls(0, 0, 0, 0)

    @classmethod
    def typical(cls) -> Timing:
        """As measured on A10G, A100 and H100: 0.4 s + bytes/2 GB/s out, 0.5 s + bytes/4 GB/s in."""
        return cls(suspend_fixed_s=0.4, suspend_bytes_per_s=2e9, restore_fixed_s=0.5, restore_bytes_per_s=4e9)
