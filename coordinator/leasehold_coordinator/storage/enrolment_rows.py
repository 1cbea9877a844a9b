"""Rows of join tokens, and of the workers that joined by them."""

from typing import Any

import sqlalchemy as sa
from google.protobuf.message import DecodeError
from leasehold.v1.enrolment_service_pb2 import JoinToken

from leasehold_coordinator.access.join_tokens import Join, StoredJoinToken
from leasehold_coordinator.access.worker_bindings import WorkerBinding
from leasehold_coordinator.storage import schema
from leasehold_coordinator.storage.read_errors import damaged
from leasehold_coordinator.storage.rows import Row
from leasehold_coordinator.storage.store import Store


def join_token_row(stored: StoredJoinToken) -> Row:
    """A join token's row."""
    joins = " ".join(
        ":".join((key_digest.hex(), join.identity, *(one.hex() for one in join.requests)))
        for key_digest, join in stored.joins.items()
    )
    return Row(
        schema.join_tokens,
        {
            "join_token_id": stored.token.join_token_id,
            "secret_digest": stored.secret_digest,
            "joins": joins,
            "record": stored.token.SerializeToString(),
        },
    )


def binding_row(binding: WorkerBinding) -> Row:
    """The row of an enrolled worker."""
    return Row(
        schema.worker_bindings,
        {
            "name": binding.name,
            "worker_id": binding.worker_id,
            "gpu_uuids": " ".join(sorted(binding.gpu_uuids)),
            "epoch": binding.epoch,
        },
    )


async def read_join_tokens(store: Store) -> list[StoredJoinToken]:
    """Every join token.

    Raises:
        FleetError: STORAGE_DAMAGED, a row is damaged.
    """
    return [_join_token(row) for row in await store.all_rows(schema.join_tokens)]


async def read_bindings(store: Store) -> list[WorkerBinding]:
    """Every enrolled worker.

    Raises:
        FleetError: STORAGE_DAMAGED, a row is damaged.
    """
    rows = await store.all_rows(schema.worker_bindings)
    return [
        WorkerBinding(row.name, row.worker_id, frozenset(row.gpu_uuids.split()), row.epoch) for row in rows
    ]


def _join_token(row: sa.Row[Any]) -> StoredJoinToken:
    try:
        token = JoinToken.FromString(row.record)
        joins: dict[bytes, Join] = {}
        for word in row.joins.split():
            key_digest, identity, *requests = word.split(":")
            joins[bytes.fromhex(key_digest)] = Join(identity, tuple(map(bytes.fromhex, requests)))
        return StoredJoinToken(token, row.secret_digest, joins)
    except (DecodeError, ValueError) as error:
        raise damaged(schema.join_tokens, row) from error
