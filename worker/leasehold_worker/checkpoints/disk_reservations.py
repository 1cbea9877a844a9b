"""Reservations of disk for checkpoints in progress: they count before they are written."""

import threading
from collections.abc import Callable
from typing import Final, Self, TypeAlias, final

from leasehold_worker.errors import OperationError

STEP_BYTES: Final = 64 << 20
"""Step of a reservation of unknown size."""

MakeRoom: TypeAlias = Callable[[int, Callable[[], bool]], None]
"""Makes room for more bytes, as long as the second argument returns True."""


@final
class DiskReservation:
    """The reservation of one checkpoint in progress. It ends with the context.

    Args:
        rooms: The reservations that it belongs to.
        make: Makes room for more bytes while a condition holds, or raises. It blocks.
    """

    def __init__(self, rooms: "DiskReservations", make: MakeRoom) -> None:
        self._rooms = rooms
        self._make = make
        self.held_bytes = 0
        """Reserved bytes."""
        self.written_bytes = 0
        """Bytes that are on disk already."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._rooms.remove(self)

    @property
    def is_open(self) -> bool:
        """Whether the context has not ended. Nothing is deleted for an ended reservation."""
        return self._rooms.has(self)

    def hold(self, size_bytes: int) -> None:
        """Reserves the total size. It blocks.

        After the end of the context, it does nothing: the caller may have given up on a disk that hung.

        Raises:
            OperationError: INSUFFICIENT_DISK: the reservation is unchanged.
        """
        with self._rooms.lock:
            if size_bytes > self.held_bytes and self.is_open:
                self._make(size_bytes - self.held_bytes, lambda: self.is_open)
                self.held_bytes = size_bytes

    def extend(self, size_bytes: int) -> None:
        """Extends the reservation to the bytes written so far. A larger one stays."""
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
    """The current reservations. Callable from any thread."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Held while room is made."""
        self._rooms: set[DiskReservation] = set()

    def open(self, make: MakeRoom) -> DiskReservation:
        """A reservation of no bytes."""
        room = DiskReservation(self, make)
        self._rooms.add(room)
        return room

    def has(self, room: DiskReservation) -> bool:
        """Whether a reservation has not been removed."""
        return room in self._rooms

    def remove(self, room: DiskReservation) -> None:
        """Removes a reservation. Repeated calls do nothing."""
        self._rooms.discard(room)

    @property
    def held_bytes(self) -> int:
        """The sum of the reservations."""
        return sum(room.held_bytes for room in tuple(self._rooms))

    @property
    def unwritten_bytes(self) -> int:
        """The part that is not on disk yet."""
        return sum(max(0, room.held_bytes - room.written_bytes) for room in tuple(self._rooms))
