"""One conversation with ``criu swrk``: a process for each request, over a socket of packets.

CRIU carries out one request, tells the steps that it comes to, and waits after each until it may go on.
"""

import logging
import os
import resource
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, final

import trio
from google.protobuf.message import DecodeError
from leasehold.v1 import criu_pb2
from leasehold.v1.criu_pb2 import CriuRequest, CriuResponse

logger = logging.getLogger(__name__)

PACKET_BYTES: Final = 1 << 20
"""Longest answer that is read."""

PLUGIN_VARIABLE: Final = "CRIU_LIBS_DIR"
"""Names the directory that CRIU loads plugins from: without it, one that was set when it was built."""


class SwrkError(Exception):
    """CRIU ended without an answer, or with one that can't be read; the text is part of a sentence."""


def forbid_writing(pid: int) -> None:
    """Makes a CRIU that dumps fail at its next write, upon which it lets the processes go on as they were.

    It can't be asked to stop, and a kill would leave its code in processes that it had stopped. Its files are
    limited to nothing instead; it runs with the signal ignored that this would send.
    """
    try:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    except OSError as error:
        logger.warning("criu could not be forbidden to write: %s", error)


@final
class Swrk:
    """A running ``criu swrk``."""

    def __init__(self, process: trio.Process, connection: trio.socket.SocketType) -> None:
        self._process = process
        self._socket = connection

    async def send(self, request: CriuRequest) -> None:
        """Sends a request, or the answer to a notification.

        Raises:
            SwrkError: CRIU has ended.
        """
        try:
            await self._socket.send(request.SerializeToString())
        except OSError as error:
            raise SwrkError(f"it has ended ({error.strerror})") from error

    async def receive(self) -> CriuResponse:
        """The next answer or notification. When it is cancelled none is lost.

        Raises:
            SwrkError: CRIU has ended, or says what is no answer.
        """
        try:
            packet = await self._socket.recv(PACKET_BYTES)
        except OSError as error:
            raise SwrkError(f"its socket failed ({error.strerror})") from error
        if not packet:
            raise SwrkError("it ended without an answer")
        try:
            return CriuResponse.FromString(packet)
        except DecodeError as error:
            raise SwrkError("its answer can't be read") from error

    async def go_on(self, success: bool) -> None:
        """Answers a notification.

        Args:
            success: False makes CRIU undo what it has done, and fail.
        """
        await self.send(CriuRequest(type=criu_pb2.CRIU_REQUEST_TYPE_NOTIFY, notify_success=success))

    def forbid_writing(self) -> None:
        """Makes a dump fail at its next write."""
        forbid_writing(self._process.pid)

    async def end(self, timeout_s: float) -> bool:
        """Closes the conversation and waits for CRIU's end.

        Returns:
            False: it has not ended in time, and was killed.
        """
        self._socket.close()
        with trio.move_on_after(timeout_s):
            await self._process.wait()
        if self._process.returncode is not None:
            return True
        self._process.kill()
        await self._process.wait()
        return False


@asynccontextmanager
async def start(
    criu: Path, *, errors: int, environment: Mapping[str, str] | None = None, end_timeout_s: float = 10.0
) -> AsyncIterator[Swrk]:
    """Starts a ``criu swrk``, and waits for its end afterwards.

    Args:
        criu: The program.
        errors: Descriptor of a file for what it says before it opens its log.
        environment: More of its environment.
        end_timeout_s: How long its end may take before it is killed.

    Raises:
        SwrkError: It could not be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        process = await trio.lowlevel.open_process(
            [str(criu), "swrk", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=errors,
            stderr=errors,
            env={**os.environ, **(environment or {})},
            pass_fds=(theirs.fileno(),),
            # So that SIGXFSZ and SIGPIPE stay ignored: to CRIU a write that fails is an error, not its end.
            restore_signals=False,
            start_new_session=True,
        )
    except OSError as error:
        ours.close()
        raise SwrkError(f"can't start criu ({error.strerror})") from error
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    swrk = Swrk(process, trio.socket.from_stdlib_socket(ours))
    try:
        yield swrk
    finally:
        with trio.CancelScope(shield=True):
            if not await swrk.end(end_timeout_s):
                logger.warning("criu did not end within %g s, and was killed", end_timeout_s)
