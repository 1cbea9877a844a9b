"""The hashes that chain the entries of the audit. Pure.

Each hash covers all other fields of its entry, and so the hash of the entry before. Whoever changes, removes
or inserts an entry must recompute all later hashes, which a hash that is kept elsewhere shows.
"""

from hashlib import sha256
from typing import Final

from leasehold.v1.audit_pb2 import AuditEntry

FIRST: Final = bytes(32)
"""The hash before entry 1."""

_LENGTH_BYTES: Final = 8


def entry_hash(entry: AuditEntry) -> bytes:
    """SHA-256 of an entry's fields in the order of their numbers, without ``hash``.

    Each field is preceded by its length, in 8 bytes, big endian. Numbers are written in decimal, the time in
    nanoseconds of the Unix epoch, and text in UTF-8.
    """
    digest = sha256()
    for part in (
        str(entry.number),
        str(entry.time.ToNanoseconds()),
        entry.identity,
        entry.address,
        entry.on_behalf_of,
        entry.method,
        entry.resource,
        entry.arguments,
        entry.arguments_digest,
        str(entry.outcome),
        str(entry.reason),
        entry.message,
        str(entry.count),
        entry.command_id,
        entry.previous_hash,
    ):
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    return digest.digest()
