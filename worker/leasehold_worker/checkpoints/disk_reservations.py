"""Room on disk for what is being written: it counts as taken before it is, so that no two get the same."""

import threading
from collections.abc import Callable
from typing import Final, Self, final

from leasehold_worker.errors import OperationError

STEP_BYTES: Final = 64 << 20
"""How much more is asked for where nobody knows how much it will be."""


@final
class DiskReservation:
    """Room for one thing that is being written. It is given back at the end of the context.

    Args:
        rooms: Where it is one of.
        make: Sees to it that so many bytes more fit, or raises. It blocks.
    """

    def __init__(self, rooms: "DiskReservations", make: Callable[[int], None]) -> None:
        self._rooms = rooms
        self._make = make
        self.held_bytes = 0
        """What it may become."""
        self.written_bytes = 0
        """What of it is on disk, which has that much less."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._rooms.remove(self)

    def hold(self, size_bytes: int) -> None:
        """Holds as much as it may become in all. It blocks.

        Raises:
            OperationError: INSUFFICIENT_DISK: it holds what it held before.
        """
        with self._rooms.lock:
            if size_bytes > self.held_bytes:
                self._make(size_bytes - self.held_bytes)
                self.held_bytes = size_bytes

    def extend(self, size_bytes: int) -> None:
        """As :meth:`hold`, of what is being written, up to here. It may hold more, for what is to come."""
        if size_bytes <= self.held_bytes:
            self.written_bytes = size_bytes
            return
        try:
            self.hold(size_bytes + STEP_BYTES)
        except OperationError:
            self.hold(size_bytes)
        self.written_bytes = size_bytes


@final
class DiskReservations:
    """The rooms that are held. Any thread may ask."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held by whoever makes room."""
        self._rooms: set[DiskReservation] = set()

    def open(self, make: Callable[[int], None]) -> DiskReservation:
        """A room of no bytes."""
        room = DiskReservation(self, make)
        self._rooms.add(room)
        return room

    def remove(self, room: DiskReservation) -> None:
        """Gives a room back. Repeating does nothing."""
        self._rooms.discard(room)

    @property
    def held_bytes(self) -> int:
        """What will be there once all is written."""
        return sum(room.held_bytes for room in tuple(self._rooms))

    @property
    def unwritten_bytes(self) -> int:
        """What of that the disk has still to take."""
        return sum(max(0, room.held_bytes - room.written_bytes) for room in tuple(self._rooms))
