"""The protocol of ``criu swrk``: a process for each request, over a packet socket.

CRIU executes one request, reports its steps, and waits after each for permission to continue.
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

from leasehold_worker.criu import criu_pb2
from leasehold_worker.criu.criu_pb2 import CriuRequest, CriuResponse

logger = logging.getLogger(__name__)

PACKET_BYTES: Final = 1 << 20
"""Longest answer that is read."""

PLUGIN_VARIABLE: Final = "CRIU_LIBS_DIR"
"""Variable with the directory of CRIU's plugins, instead of the default of its build."""


class SwrkError(Exception):
    """CRIU ended without an answer, or with one that can't be read; the text is part of a sentence."""


def forbid_writing(pid: int) -> None:
    """Makes a dumping CRIU fail at its next write, which makes it release the processes.

    It can't be asked to stop, and a kill would leave its code in processes that it had stopped. Its files are
    limited to nothing instead; it runs with the signal ignored that this would send.
    """
    try:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    except OSError as error:
        logger.warning("criu could not be forbidden to write: %s", error)


@final
class Swrk:
    """A running ``criu swrk`` process."""

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
        """The next answer or notification. A cancellation loses none.

        Raises:
            SwrkError: CRIU has ended, or sent an invalid answer.
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
            success: False makes CRIU roll back, and fail.
        """
        await self.send(CriuRequest(type=criu_pb2.CRIU_REQUEST_TYPE_NOTIFY, notify_success=success))

    def forbid_writing(self) -> None:
        """Makes a dump fail at its next write."""
        forbid_writing(self._process.pid)

    async def end(self, timeout_s: float) -> bool:
        """Closes the socket and waits for CRIU's end.

        Returns:
            False: CRIU did not end in time, and was killed.
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
    """Starts a ``criu swrk``, and waits for its end after the context.

    Args:
        criu: The program.
        errors: Descriptor of a file for errors before it opens its log.
        environment: Additional environment.
        end_timeout_s: Time to end before it is killed.

    Raises:
        SwrkError: CRIU could not be started.
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
