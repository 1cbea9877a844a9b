"""The unix socket of the local API. The kernel identifies its peers.

gRPC does not expose the sockets of its peers. So connections are accepted here, where the kernel identifies
the peer (unix(7)), and are forwarded byte by byte to gRPC's own listener. Each has a name by which a handler
finds its peer. The listener is in a folder that only the worker's user can enter, so that no other user can
exhaust the worker's descriptors there. After a kill -9 the folder stays until the next start with the same
socket.
"""

import errno
import grp
import hashlib
import logging
import os
import secrets
import socket
import stat
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import trio

from leasehold_worker.errors import StartError
from leasehold_worker.files.file_descriptors import raise_limit
from leasehold_worker.files.folder_trees import discard_tree
from leasehold_worker.files.private_directories import require_private
from leasehold_worker.host.peers import Peer, by_credentials, by_pidfd, group_ids
from leasehold_worker.host.processes import ProcessIdentity, user_name
from leasehold_worker.local_api.refusal_log import RefusalLog
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

MODE: Final = 0o660
CONNECTIONS_LIMIT: Final = 512
"""Connections at once; further ones wait."""

USER_CONNECTIONS_LIMIT: Final = 128
"""Connections of one user other than root and the worker's; further ones are refused."""

CONNECTIONS_KEPT: Final = 64
"""Connections reserved for root and the worker's user."""

DESCRIPTORS_KEPT: Final = 256
"""Descriptors reserved for other uses than connections."""

DESCRIPTORS_EACH: Final = 3
"""Descriptors of a connection: both sides of the forwarder, and gRPC's."""

PATH_LIMIT: Final = 107
"""Bytes of a path in sockaddr_un (unix(7)), without the final zero."""

REMEDY: Final = "choose another path by the setting `socket`"

DIRECTORY_TIMEOUT_S: Final = 10.0
LOOK_UPS_AT_ONCE: Final = 8
"""Threads that look up users in the directory, including those that hang."""

CHUNK_BYTES: Final = 65_536
_CREDENTIALS: Final = struct.Struct("3i")
_BOOT: Final = time.CLOCK_BOOTTIME
_SCHEME: Final = "unix-abstract:"


_NOT_OURS: Final = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP})
"""Errors of accept(2) after which the socket is no listener any more. All others pass."""


@final
class LocalSocket:
    """The socket. It exists from the start, and accepts no connection before :meth:`run`.

    Args:
        path: Its path.
        group: Name of the group that may connect besides the worker's user and root. Empty: the worker's own.

    Raises:
        StartError: The socket can't be created.
    """

    def __init__(self, path: Path, group: str) -> None:
        self.path = path
        self._gid = _gid(group)
        self._peers: dict[str, Peer] = {}
        self._connections = Counter[int]()
        """Connections by user."""
        self._look_ups = trio.CapacityLimiter(LOOK_UPS_AT_ONCE)
        self._others = 0
        """Connections of users other than root and the worker's."""
        self._limit = _connections_limit(raise_limit())
        self._refusals = RefusalLog()
        self._socket = _listen(path, self._gid)
        try:
            self._folder = _make_folder(path)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            self._socket.close()
            raise StartError(
                f"can't create a folder for sockets in {_temporary()} ({error.strerror}): set "
                "TMPDIR to another directory"
            ) from error
        self.inner_path = self._folder / "grpc"
        """gRPC's own listener, which serves only forwarded connections."""

    def peer(self, grpc_peer: str) -> Peer | None:
        """The process behind a gRPC peer, by ``context.peer()``. None: the connection was not forwarded."""
        return self._peers.get(grpc_peer.removeprefix(_SCHEME))

    @property
    def inner_address(self) -> str:
        """Address of gRPC's own listener."""
        return f"unix:{self.inner_path}"

    async def run(self) -> None:
        """Accepts connections until cancelled, and then removes the socket."""
        limit = trio.CapacityLimiter(self._limit)
        listener = trio.socket.from_stdlib_socket(self._socket)
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await limit.acquire_on_behalf_of(token := object())
                    connection = await _accept(listener)
                    nursery.start_soon(self._pass_on, connection, time.clock_gettime(_BOOT), limit, token)
        finally:
            # Before the lock is released: the next worker may start immediately.
            self.path.unlink(missing_ok=True)
            listener.close()

    def close(self) -> None:
        """Removes the socket, if it is there."""
        if self._socket.fileno() >= 0:
            self.path.unlink(missing_ok=True)
            self._socket.close()
        discard_tree(self._folder)

    async def _pass_on(
        self,
        connection: trio.socket.SocketType,
        taken_at: float,
        limit: trio.CapacityLimiter,
        token: object,
    ) -> None:
        """Serves one connection until its end. An error affects no other one."""
        uid = -1  # no user's
        try:
            pid, uid, gid = _CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            peer = await self._identify(connection, pid, uid, gid, taken_at)
            if peer is not None:
                with self._counted(peer) as admitted:
                    if admitted:
                        await self._join(connection, peer)
        except OSError as error:
            self._refusals.note(uid, "failure", f"a local connection of user {uid} failed: {error}")
        finally:
            connection.close()
            limit.release_on_behalf_of(token)

    @contextmanager
    def _counted(self, peer: Peer) -> Iterator[bool]:
        """Counts a connection of a user. Yields False at the limit."""
        if not peer.is_trusted and self._others >= self._limit - CONNECTIONS_KEPT:
            self._note(
                peer.uid, f"rejected a connection of user {peer.user}: users have {self._others} of them"
            )
            yield False
            return
        if not peer.is_trusted and self._connections[peer.uid] >= USER_CONNECTIONS_LIMIT:
            self._note(
                peer.uid,
                f"user {peer.user} has {USER_CONNECTIONS_LIMIT} local connections, which is the limit",
            )
            yield False
            return
        self._connections[peer.uid] += 1
        self._others += not peer.is_trusted
        try:
            yield True
        finally:
            self._connections[peer.uid] -= 1
            self._others -= not peer.is_trusted
            if not self._connections[peer.uid]:
                del self._connections[peer.uid]

    async def _join(self, connection: trio.socket.SocketType, peer: Peer) -> None:
        name = f"leasehold-{secrets.token_hex(16)}"
        inner = trio.socket.socket(socket.AF_UNIX)
        try:
            self._peers[name] = peer
            await inner.bind(f"\0{name}".encode())  # as bytes: trio takes a thread for a str
            await inner.connect(str(self.inner_path))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_pump, connection, inner, nursery.cancel_scope)
                nursery.start_soon(_pump, inner, connection, nursery.cancel_scope)
        finally:
            # Removed before the address is free: its next user must not get the identity of this peer.
            self._peers.pop(name, None)
            inner.close()

    async def _identify(
        self, connection: trio.socket.SocketType, pid: int, uid: int, gid: int, taken_at: float
    ) -> Peer | None:
        try:
            identity = by_pidfd(connection)
        except OSError as error:
            if error.errno != errno.ENOPROTOOPT:
                raise
            identity = by_credentials(pid, uid, taken_at)
        if identity is None:
            self._note(
                uid,
                f"rejected a connection of user {uid} from a process that has ended, or is not visible here",
            )
            return None
        with trio.move_on_after(DIRECTORY_TIMEOUT_S):
            limiter = None if uid in (0, os.geteuid()) else self._look_ups
            return await run_in_thread(
                self._admit, identity, uid, gid, abandon_on_cancel=True, limiter=limiter
            )
        self._note(
            uid,
            f"rejected a connection of user {uid}: the host's directory of users did not answer within "
            f"{DIRECTORY_TIMEOUT_S:g} s",
        )
        return None

    def _admit(self, identity: ProcessIdentity, uid: int, gid: int) -> Peer | None:
        """Looks a user up in the host's directory, which may take long."""
        if uid not in (0, os.geteuid()) and self._gid not in group_ids(uid, gid):
            who = f"process {identity.pid} of user {user_name(uid)} (uid {uid})"
            self._note(uid, f"rejected a connection of {who}, who is not permitted to connect")
            return None
        return Peer(identity, uid, user_name(uid))

    def _note(self, uid: int, refusal: str) -> None:
        """Logs the first refusal of a user's connections in each period, and counts the others."""
        self._refusals.note(uid, "connection", refusal)


def _connections_limit(descriptors: int) -> int:
    """Number of connections for which the descriptors suffice."""
    return max(1, min(CONNECTIONS_LIMIT, (descriptors - DESCRIPTORS_KEPT) // DESCRIPTORS_EACH))


def _temporary() -> Path:
    """The folder of temporary files, unless it is too long for the path of a socket."""
    folder = tempfile.gettempdir()
    return Path(folder if len(os.fsencode(folder)) < PATH_LIMIT - 50 else "/tmp")  # noqa: S108 - mkdtemp's


def _make_folder(path: Path) -> Path:
    """Creates a folder that only the worker's user may enter, for this start of the socket.

    Folders of killed earlier starts of the same socket are removed: their names identify them.
    """
    prefix = f"leasehold-{hashlib.sha256(os.fsencode(path.absolute())).hexdigest()[:12]}-"
    for stale in _temporary().glob(f"{prefix}*"):
        try:
            if stale.lstat().st_uid == os.geteuid():
                discard_tree(stale)
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix=prefix, dir=_temporary()))


def _gid(group: str) -> int:
    if not group:
        return os.getegid()
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise StartError(
            f"socket_group {group!r} does not exist on this host: create it, or name another"
        ) from None


def _listen(path: Path, gid: int) -> socket.socket:
    if len(os.fsencode(path)) > PATH_LIMIT:
        raise StartError(
            f"the socket's path {path} is longer than {PATH_LIMIT} bytes, the limit of a unix "
            f"socket: {REMEDY}"
        )
    listener = socket.socket(socket.AF_UNIX)
    try:
        _make_public(path.parent)
        require_private(path.parent, "socket's directory", may_be_roots=True)
        _remove_stale(path)
        mask = os.umask(0o777)  # no access before the mode is set
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
        if gid != os.getegid():
            os.chown(path, -1, gid)
        path.chmod(MODE)
        listener.listen(128)
    except StartError:
        listener.close()
        raise
    except OSError as error:
        listener.close()
        raise StartError(f"can't create the socket {path} ({error.strerror}): {REMEDY}") from error
    return listener


def _make_public(folder: Path) -> None:
    """Creates a missing directory that every user may pass through, independent of the worker's umask."""
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir()
        missing.chmod(0o755)


def _remove_stale(path: Path) -> None:
    """Removes a socket without a listener.

    Raises:
        StartError: The socket has a listener, or the path is not a socket.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise StartError(f"{path} exists and is not a socket: {REMEDY}")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except (BlockingIOError, TimeoutError):
            pass  # a worker listens and has a full backlog
    raise StartError(f"another worker serves the socket {path}: {REMEDY}")


async def _accept(listener: trio.socket.SocketType) -> trio.socket.SocketType:
    while True:
        try:
            connection, _ = await listener.accept()
        except OSError as error:
            if error.errno in _NOT_OURS:
                raise
            logger.warning("can't accept a local connection for now: %s", error.strerror)
            await trio.sleep(1.0)
        else:
            return connection


async def _pump(
    source: trio.socket.SocketType, sink: trio.socket.SocketType, scope: trio.CancelScope
) -> None:
    """Forwards bytes until one side ends."""
    out = trio.SocketStream(sink)
    try:
        while data := await source.recv(CHUNK_BYTES):
            await out.send_all(data)
    except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
        pass
    scope.cancel()
