"""Records of rows, whose digests are checked."""

import logging
from typing import Any, Final, TypeVar, final

import sqlalchemy as sa
from google.protobuf.message import DecodeError, Message

from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.read_errors import damaged
from leasehold_coordinator.storage.row_digests import is_whole

logger = logging.getLogger(__name__)

Record = TypeVar("Record", bound=Message)

TOLD_LIMIT: Final = 1_000
"""Most damaged rows that the log names, each once."""


@final
class RecordDecoder:
    """Decodes records, and logs each damaged row once."""

    def __init__(self) -> None:
        self._told_damage: set[tuple[str, str]] = set()
        """Table and key of damaged rows already in the log."""

    def decode_if_whole(self, kind: type[Record], table: sa.Table, row: sa.Row[Any]) -> Record | None:
        """A row's record. None: the row is damaged, which is logged once."""
        try:
            return self.decode(kind, table, row)
        except FleetError:
            return None

    def decode(self, kind: type[Record], table: sa.Table, row: sa.Row[Any]) -> Record:
        """A row's record.

        Raises:
            FleetError: STORAGE_DAMAGED, the row is damaged.
        """
        try:
            if is_whole(table, row._mapping):
                return kind.FromString(row.hello if table is schema.workers else row.record)
        except DecodeError:
            pass
        error = damaged(table, row)
        told = (error.metadata["table"], error.metadata["key"])
        if told not in self._told_damage and len(self._told_damage) < TOLD_LIMIT:
            self._told_damage.add(told)
            logger.error("%s; lists skip the row", error.message)
        raise error
