"""The file format of an application checkpoint: a header of fixed size, then the payload.

======  =====  ==============================================================
offset  bytes
======  =====  ==============================================================
0       8      magic, ``LHKERNEL``
8       4      version of this format, little endian, as all numbers here
12      4      length of the header
16      32     SHA-256 of the header
48      …      the header: JSON in UTF-8
…       …      zeros
65536   …      the payload, whose size and SHA-256 the header says
======  =====  ==============================================================

The header comes first, so that a list of checkpoints reads no payload. Size and digest are known only at the
end, so its room is left free and filled last. Nothing here blocks for long, but it reads and writes files.
"""

import hashlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import msgspec
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Kernel

from leasehold_worker.errors import OperationError
from leasehold_worker.files.regular_files import is_tellable, open_regular

MAGIC: Final = b"LHKERNEL"
FORMAT: Final = 1
PAYLOAD_OFFSET: Final = 65_536
READ_BYTES: Final = 1_048_576

CUSTOM_LIMIT: Final = 64
"""Number of an application's custom entries in a checkpoint."""

CUSTOM_LIMIT_BYTES: Final = 8192
"""Bytes of an application's custom entries, keys and values together."""

_PREFIX: Final = struct.Struct("<8sII32s")
_HEADER_LIMIT: Final = PAYLOAD_OFFSET - _PREFIX.size


class ApplicationHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a header.

    Attributes:
        checkpoint_id: Unique in the fleet.
        workload_id: The workload.
        workload_name: Name of the workload.
        kernel_id: Id of the application.
        kind: Kind of the application.
        version: Version of its state.
        created: Time of its completion.
        size_bytes: Size of the payload.
        sha256: Digest of the payload, in hexadecimal.
        custom: Custom entries of the application.
        worker_id: Worker that wrote it. Empty: an older release wrote it.
        owner: Owner of the workload. Empty: unknown.
    """

    checkpoint_id: str
    workload_id: str
    workload_name: str
    kernel_id: str
    kind: str
    version: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    created: Annotated[datetime, msgspec.Meta(tz=True)]
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**62)]
    sha256: str
    custom: dict[str, str]
    worker_id: str = ""
    owner: str = ""

    @property
    def kernel(self) -> Kernel:
        """The application that saved itself."""
        return Kernel(kernel_id=self.kernel_id, kind=self.kind, version=self.version)


_encoder: Final = msgspec.json.Encoder()
_decoder: Final = msgspec.json.Decoder(ApplicationHeader)


def corrupt(checkpoint_id: str, how: str) -> OperationError:
    """The error for a damaged checkpoint."""
    return OperationError(
        errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT,
        f"checkpoint {checkpoint_id} is damaged ({how}): restore another one, and check the disk",
        {"checkpoint_id": checkpoint_id},
    )


def check_custom(custom: Mapping[str, str]) -> None:
    """Refuses custom entries beyond the limits.

    Raises:
        OperationError: KERNEL_FAILED.
    """
    size = sum(len(key.encode()) + len(value.encode()) for key, value in custom.items())
    if len(custom) > CUSTOM_LIMIT or size > CUSTOM_LIMIT_BYTES:
        raise OperationError(
            errors_pb2.ERROR_REASON_KERNEL_FAILED,
            f"the application stores {size} bytes in {len(custom)} custom entries, and the "
            f"limits are {CUSTOM_LIMIT_BYTES} bytes and {CUSTOM_LIMIT} entries: save the rest "
            "as part of the checkpoint",
        )


def write_header(descriptor: int, application_header: ApplicationHeader) -> None:
    """Writes the header, and everything else before the payload.

    A valid header always fits: JSON makes at most six bytes of a character.

    Raises:
        OSError: The disk refuses the write.
    """
    header = _encoder.encode(application_header)
    if len(header) > _HEADER_LIMIT:
        raise AssertionError(f"a header of {len(header)} bytes exceeds {_HEADER_LIMIT}")
    prefix = _PREFIX.pack(MAGIC, FORMAT, len(header), hashlib.sha256(header).digest())
    room = (prefix + header).ljust(PAYLOAD_OFFSET, b"\0")
    if os.pwrite(descriptor, room, 0) != len(room):
        raise OSError("the header was written only in part")


def read_envelope(path: Path) -> ApplicationHeader:
    """Reads a header. Of the payload, only the size is checked.

    Raises:
        OperationError: CHECKPOINT_CORRUPT, or CHECKPOINT_INCOMPATIBLE for a format of a later release.
        OSError: The file can't be read.
    """
    with open_regular(path) as descriptor:
        return read_header(descriptor, path)


def read_header(descriptor: int, path: Path) -> ApplicationHeader:
    """Like :func:`read_envelope`, for an open file."""
    checkpoint_id = path.stem
    room = _read_all(descriptor, PAYLOAD_OFFSET)
    if len(room) < PAYLOAD_OFFSET or not room.startswith(MAGIC):
        raise corrupt(checkpoint_id, "has no header")
    _, version, length, digest = _PREFIX.unpack_from(room)
    if version != FORMAT:
        raise OperationError(
            errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE,
            f"checkpoint {checkpoint_id} has format {version}, and this worker reads {FORMAT}: restore it "
            "with a worker of the release that wrote it",
            {"checkpoint_id": checkpoint_id},
        )
    header = room[_PREFIX.size : _PREFIX.size + length]
    if len(header) < length or hashlib.sha256(header).digest() != digest:
        raise corrupt(checkpoint_id, "has a modified header")
    try:
        application_header = _decoder.decode(header)
        check_custom(application_header.custom)
    except (msgspec.MsgspecError, RecursionError, ValueError, OperationError) as error:
        raise corrupt(checkpoint_id, "has an inconsistent header") from error
    if not is_tellable(application_header.created):
        raise corrupt(checkpoint_id, "has an invalid time in its header")
    if (application_header.checkpoint_id, application_header.workload_id) != (
        checkpoint_id,
        path.parent.name,
    ):
        raise corrupt(checkpoint_id, "has the id of another checkpoint")
    size = os.fstat(descriptor).st_size
    if size != PAYLOAD_OFFSET + application_header.size_bytes:
        raise corrupt(
            checkpoint_id, f"has {size} bytes instead of {PAYLOAD_OFFSET + application_header.size_bytes}"
        )
    return application_header


def read_payload(
    descriptor: int, application_header: ApplicationHeader, piece_bytes: int = READ_BYTES
) -> Iterator[bytes]:
    """Reads the payload from its start, in pieces.

    Raises:
        OperationError: CHECKPOINT_CORRUPT: the payload ends too early.
        OSError: The file can't be read.
    """
    position = PAYLOAD_OFFSET
    end = PAYLOAD_OFFSET + application_header.size_bytes
    while position < end:
        piece = os.pread(descriptor, min(piece_bytes, end - position), position)
        if not piece:
            raise corrupt(application_header.checkpoint_id, "ends too early")
        position += len(piece)
        yield piece


def verify_payload(descriptor: int, application_header: ApplicationHeader, check: Callable[[], None]) -> None:
    """Reads the whole payload, and compares its digest.

    Args:
        descriptor: The open file.
        application_header: Its header.
        check: Called repeatedly. Its exception ends the call.

    Raises:
        OperationError: CHECKPOINT_CORRUPT.
        OSError: The file can't be read.
    """
    digest = hashlib.sha256()
    for piece in read_payload(descriptor, application_header):
        check()
        digest.update(piece)
    if digest.hexdigest() != application_header.sha256:
        raise corrupt(application_header.checkpoint_id, "does not match the digest in its header")


def now() -> datetime:
    """The current time in the form of a header."""
    return datetime.now(UTC)


def _read_all(descriptor: int, size: int) -> bytes:
    """The first bytes of a file, fewer if it is shorter."""
    found = bytearray()
    while len(found) < size and (piece := os.pread(descriptor, size - len(found), len(found))):
        found += piece
    return bytes(found)
