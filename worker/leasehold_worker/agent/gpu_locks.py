"""One worker per GPU: a worker that serves a GPU of this host holds a lock that every other worker sees.

The lock of a GPU is a listening Unix socket with an abstract name (unix(7)). The kernel gives a name to one
process at a time and frees the name with the process, however it ends. The alternatives fall short: files
below /run can't be made by ordinary users, files below /tmp and /dev/shm are removed under their holder, and
opening /dev/nvidiaN can initialise the GPU.

Abstract names belong to a network namespace. Workers in different network namespaces don't see each other's
locks; the coordinator refuses the second of them.
"""

import errno
import socket
import struct
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from leasehold_worker.errors import StartError
from leasehold_worker.host.processes import user_name

_NAME: Final = "\0leasehold/gpu/{uuid}"
_CREDENTIALS: Final = struct.Struct("iII")
"""Process id, user id and group id, as SO_PEERCRED has them."""


@contextmanager
def hold_gpus(gpu_uuids: Collection[str]) -> Iterator[None]:
    """Holds the locks of GPUs, all or none, until the context ends.

    Raises:
        StartError: Another worker serves one of the GPUs.
    """
    with ExitStack() as locks:
        # Every worker locks in this order. Of two workers that start at once, one gets all locks.
        for gpu_uuid in sorted(gpu_uuids):
            locks.enter_context(_lock(gpu_uuid))
        yield


def _lock(gpu_uuid: str) -> socket.socket:
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        lock.bind(_NAME.format(uuid=gpu_uuid))
        lock.listen(1)  # lets other workers read our process id
    except OSError as error:
        lock.close()
        if error.errno != errno.EADDRINUSE:
            raise StartError(f"GPU {gpu_uuid} can't be locked for this worker: {error.strerror}") from error
        raise StartError(
            f"GPU {gpu_uuid} is served by another worker of this host{_holder(gpu_uuid)}: "
            "stop that worker, or give each worker its own GPUs by the setting gpus"
        ) from error
    return lock


def _holder(gpu_uuid: str) -> str:
    """The holder of a lock, as text. Empty: the holder does not answer or has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking, suppress(OSError):
        asking.setblocking(False)
        asking.connect(_NAME.format(uuid=gpu_uuid))
        found = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(found)
        return f", process {pid} of user {user_name(uid)}"
    return ""
