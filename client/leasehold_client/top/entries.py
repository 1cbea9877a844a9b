"""The entries of one kind, as a watch tells them. Pure."""

from typing import Generic, TypeVar, final

Value = TypeVar("Value")


@final
class Entries(Generic[Value]):
    """Entries by key. While a snapshot arrives, the entries before it stay.

    Attributes:
        values: The entries of the last complete snapshot, with all later changes.
    """

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self._snapshot: dict[str, Value] | None = {}

    @property
    def is_complete(self) -> bool:
        """Whether no snapshot is awaited."""
        return self._snapshot is None

    def begin_snapshot(self) -> None:
        """Collects the following entries apart, until :meth:`end_snapshot`."""
        self._snapshot = {}

    def end_snapshot(self) -> None:
        """Forgets the entries that the snapshot lacks. Without a snapshot, nothing changes."""
        if self._snapshot is not None:
            self.values, self._snapshot = self._snapshot, None

    def put(self, key: str, value: Value) -> None:
        """Takes the current state of an entry."""
        self._target[key] = value

    def remove(self, key: str) -> None:
        """Takes a deletion, also of an entry that is not known."""
        self._target.pop(key, None)

    @property
    def _target(self) -> dict[str, Value]:
        return self.values if self._snapshot is None else self._snapshot
