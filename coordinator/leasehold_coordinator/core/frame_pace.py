"""How fast the frames of one worker are read. Pure.

A worker above its rate is read more slowly. HTTP/2's flow control then stops the worker's sender, so nothing
piles up here, and other workers keep their share of the loop.
"""

from dataclasses import dataclass
from typing import Final, final

FRAMES_PER_S: Final = 200.0
FRAME_BURST: Final = 5_000
"""Frames that a worker may send at once, such as the reports of all its workloads after an outage."""

BYTES_PER_S: Final = 4 * 2**20
BYTE_BURST: Final = 64 * 2**20


@final
@dataclass(slots=True)
class FramePace:
    """The recent frames of one worker, over all its sessions.

    Attributes:
        noted_s: When the last frame was noted, by the monotonic clock.
        frames: Frames that count against the burst.
        size_bytes: Their bytes.
    """

    noted_s: float = 0.0
    frames: float = 0.0
    size_bytes: float = 0.0

    def delay_s(self, size_bytes: int, now: float) -> float:
        """Notes a frame, and returns how long to wait before the next one is read.

        Args:
            size_bytes: Size of the frame.
            now: The present time, by the monotonic clock.
        """
        elapsed_s = max(0.0, now - self.noted_s)
        self.noted_s = now
        self.frames = max(0.0, self.frames - elapsed_s * FRAMES_PER_S) + 1
        self.size_bytes = max(0.0, self.size_bytes - elapsed_s * BYTES_PER_S) + size_bytes
        return max(
            0.0,
            (self.frames - FRAME_BURST) / FRAMES_PER_S,
            (self.size_bytes - BYTE_BURST) / BYTES_PER_S,
        )
