"""GPU UUIDs as users and libraries write them."""

import re

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError

_UUID = re.compile(r"GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def normalize_uuid(text: str) -> str:
    """Brings a GPU's UUID into NVML's form; the prefix ``GPU-`` and the case don't matter.

    Raises:
        OperationError: INVALID_ARGUMENT, the text is not a UUID.
    """
    bare = text.strip().lower().removeprefix("gpu-")
    uuid = f"GPU-{bare}"
    if not _UUID.fullmatch(uuid):
        raise OperationError(
            errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
            f"invalid GPU UUID {text!r}: it looks like GPU-12345678-1234-1234-1234-123456789abc",
            {"field": "gpu_uuid"},
        )
    return uuid
