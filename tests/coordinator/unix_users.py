"""Calls of other Unix users through a coordinator's socket, from the process of the test.

A relay connects for each of them. The kernel takes a peer's user from the thread that connects (unix(7)), and
the system call, unlike its wrapper in the C library, changes the user of one thread.
"""

import ctypes
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, final

import grpc
import pytest

ANN: Final = 61_001
BEN: Final = 61_002
"""User ids without login names, so that no account of the machine matters."""

CHUNK_BYTES: Final = 65_536
_CLONE_FS: Final = 0x200
_SETGROUPS, _SETRESGID, _SETRESUID = {"x86_64": (116, 119, 117), "aarch64": (159, 149, 147)}[
    os.uname().machine
]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def identity(uid: int) -> str:
    """The identity of a user without a login name."""
    return f"local/uid-{uid}"


@final
class Relay:
    """Passes connections on as another user."""

    def __init__(self, path: Path, uid: int) -> None:
        _let_in(path.parent)
        self._path = path
        self._uid = uid
        self._name = f"relay-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen()
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """The relay's own address for gRPC."""
        return f"unix-abstract:{self._name}"

    def _accept(self) -> None:
        _enter(self._path.parent)
        _become(self._uid)
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            far = socket.socket(socket.AF_UNIX)
            self._open += [near, far]
            try:
                far.connect(self._path.name)
            except OSError:
                near.close()
                continue
            for source, sink in ((near, far), (far, near)):
                thread = threading.Thread(target=_pump, args=(source, sink))
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        """Ends all connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
        for one in self._open:
            one.close()


def _let_in(folder: Path) -> None:
    folder.chmod(folder.stat().st_mode | 0o001)


def _enter(folder: Path) -> None:
    """Changes the working directory of this thread alone. Other users may not enter the folders above."""
    assert ctypes.CDLL(None).unshare(_CLONE_FS) == 0
    os.chdir(folder)


def connect_as(path: Path, uid: int) -> socket.socket:
    """A connection to a socket as another user."""
    connection = socket.socket(socket.AF_UNIX)
    _let_in(path.parent)

    def connect() -> None:
        _enter(path.parent)
        _become(uid)
        connection.connect(path.name)

    thread = threading.Thread(target=connect)
    thread.start()
    thread.join(20)
    return connection


def _become(uid: int) -> None:
    """Makes another user of the present thread, for the rest of its life."""
    libc = ctypes.CDLL(None)
    assert libc.syscall(_SETGROUPS, 0, None) == 0
    assert libc.syscall(_SETRESGID, -1, uid, -1) == 0
    assert libc.syscall(_SETRESUID, -1, uid, -1) == 0


def call_as(uid: int, call: Callable[[], object]) -> None:
    """Makes a call as another user, in a thread."""

    def make() -> None:
        _become(uid)
        call()

    thread = threading.Thread(target=make)
    thread.start()
    thread.join(20)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(CHUNK_BYTES):
            sink.sendall(data)
    for one in (source, sink):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


@contextmanager
def channel_as(path: Path, uid: int) -> Iterator[grpc.Channel]:
    """A channel through a coordinator's socket as another Unix user."""
    with ExitStack() as stack:
        relay = Relay(path, uid)
        stack.callback(relay.close)
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(relay.address, options=options)
        stack.callback(channel.close)
        yield channel
