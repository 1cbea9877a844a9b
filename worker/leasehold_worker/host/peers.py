"""The process and the user at the other end of a Unix socket, as the kernel reports them (unix(7))."""

import errno
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from leasehold_worker.host.processes import ProcessIdentity, has_ended, identify, user_id

_INT: Final = struct.Struct("i")

SO_PEERPIDFD: Final = 77
"""Option for a pidfd of the peer, since Linux 6.5 (asm-generic/socket.h)."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The process at the other end of a connection.

    Attributes:
        identity: The process that connected.
        uid: Its effective user.
        user: Its name.
    """

    identity: ProcessIdentity
    uid: int
    user: str

    @property
    def is_trusted(self) -> bool:
        """Whether the user is root or the worker's own."""
        return self.uid in (0, os.geteuid())


def by_pidfd(connection: trio.socket.SocketType) -> ProcessIdentity | None:
    """The peer by the kernel's pidfd, which can't mean another process.

    Raises:
        OSError: ENOPROTOOPT: the kernel is too old.
    """
    try:
        data = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD, _INT.size)
    except OSError as error:
        # Which error means an ended process depends on the kernel.
        if error.errno in (errno.ESRCH, errno.EINVAL, errno.ENODATA):
            return None
        raise
    (pidfd,) = _INT.unpack(data)
    try:
        facts = Path(f"/proc/self/fdinfo/{pidfd}").read_text(encoding="ascii").split()
        pid = int(facts[facts.index("Pid:") + 1])
        # 0: it lives in a pid namespace that we can't see into; -1: it has ended.
        identity = identify(pid) if pid > 0 else None
        return None if has_ended(pidfd) else identity
    finally:
        os.close(pidfd)


def by_credentials(pid: int, uid: int, taken_at: float) -> ProcessIdentity | None:
    """The peer by its pid. None: the pid belongs to another process now.

    Args:
        pid: Its pid.
        uid: Its effective user.
        taken_at: Time of the accept, in seconds since boot. Younger processes can't be the peer.
    """
    identity = identify(pid) if pid > 0 else None
    if identity is None or user_id(pid) != uid:
        return None
    started_at = identity.start_time_ticks / os.sysconf("SC_CLK_TCK")
    return identity if started_at <= taken_at else None


def group_ids(uid: int, gid: int) -> set[int]:
    """The groups of a user, with the group of its process. The lookup in the host's directory may block."""
    try:
        return {gid, *os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)}
    except KeyError:
        return {gid}
