"""The connection to the worker of this host, over its unix socket."""

import grp
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Final, Generic, Self, TypeVar, cast, final

import grpc
from leasehold.local.v1 import local_service_pb2
from leasehold.local.v1.local_service_pb2 import (
    ClaimRequest,
    ClaimResponse,
    ListResponse,
    ServeKernelRequest,
    ServeKernelResponse,
)
from leasehold.local.v1.local_service_pb2_grpc import LocalServiceStub
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.config import SOCKET_PATH_LIMIT_BYTES, SOCKET_VARIABLE, state_directory
from leasehold_client.errors import LeaseholdError, UsageError, decode_refusal
from leasehold_client.request_fields import build

SYSTEM_SOCKET: Final = Path("/run/leasehold/worker/worker.sock")
CALL_TIMEOUT_S: Final = 10.0
RELEASE_TIMEOUT_S: Final = 60.0
SHORTEST_CONNECT_TIMEOUT_S: Final = 3.0
"""How long a worker has to answer at least, also if the wait of a claim is shorter or over."""

LONGEST_CONNECT_TIMEOUT_S: Final = 20.0
"""How long a worker has to answer at most, as gRPC has it by default."""

_SILENT: Final = "before receiving SETTINGS frame"
"""Part of gRPC's text if a process accepts connections and does not respond."""

Response = TypeVar("Response")


class NoWorkerError(LeaseholdError):
    """No worker answers at the socket, or the connection to the worker broke."""


def socket_path() -> Path:
    """The path of the worker's socket: LEASEHOLD_SOCKET, else the system's, else the user's own.

    Raises:
        NoWorkerError: No socket exists.
    """
    if named := os.environ.get(SOCKET_VARIABLE):
        return Path(named)
    paths = [SYSTEM_SOCKET]
    with suppress(UsageError):  # no home directory
        paths.append(state_directory() / "worker/worker.sock")
    for path in paths:
        if _is_there(path):
            return path
    raise NoWorkerError(
        f"no worker listens at {' or '.join(map(str, paths))}: start `leasehold worker`, or name its socket "
        f"with --socket or {SOCKET_VARIABLE}"
    )


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except PermissionError:  # the folder is closed to this user, which check_access reports
        return True
    except OSError:
        return False
    return True


def check_access(named: str | Path | None) -> None:
    """Checks that this user may use a socket. A missing socket passes, since its worker may be restarting.

    Args:
        named: The socket. None: :func:`socket_path`.

    Raises:
        LeaseholdError: The user lacks a permission.
        NoWorkerError: No socket is named, and no socket exists.
    """
    path = Path(named) if named is not None else socket_path()
    refused = f"user {os.geteuid()} may not use the worker's socket {path}"
    remedy = "ask for the worker's setting `socket_group` to name a group of this user"
    try:
        owner = path.stat().st_gid
    except PermissionError:
        raise LeaseholdError(
            f"{refused}, whose folder is closed to this user: {remedy}, and for its `socket` to be in "
            "a folder that the group may search"
        ) from None
    except OSError:
        return
    if not os.access(path, os.W_OK):
        raise LeaseholdError(
            f"{refused}, which belongs to group {_group_name(owner)}: join that group, or {remedy}"
        )


def _group_name(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


@final
class Deadline:
    """End of a claim's wait, also if the claim is repeated after a restart of the worker."""

    def __init__(self, wanted: local_service_pb2.ClaimOpen) -> None:
        self._time: float | None = None
        if wanted.HasField("wait"):
            self._time = time.monotonic() + wanted.wait.ToTimedelta().total_seconds()

    @property
    def left_s(self) -> float | None:
        """The remaining wait. None: no limit."""
        return None if self._time is None else max(0.0, self._time - time.monotonic())

    @property
    def connect_timeout_s(self) -> float:
        """How long the worker has to answer. A later answer could grant a claim whose wait is over."""
        left_s = LONGEST_CONNECT_TIMEOUT_S if self.left_s is None else self.left_s
        return min(max(SHORTEST_CONNECT_TIMEOUT_S, left_s), LONGEST_CONNECT_TIMEOUT_S)

    @property
    def answer_timeout_s(self) -> float | None:
        """How long the worker has to grant or refuse the claim. None: no limit."""
        left_s = self.left_s
        return None if left_s is None else min(left_s + CALL_TIMEOUT_S, threading.TIMEOUT_MAX)

    @property
    def is_over(self) -> bool:
        """Whether the wait is over. A claim that is repeated after the end of its wait could be granted."""
        return self.left_s == 0

    def apply(self, request: ClaimRequest) -> ClaimRequest:
        """Sets the remaining wait in a request."""
        left_s = self.left_s
        if left_s is not None:
            request.open.wait.FromTimedelta(timedelta(seconds=left_s))
        return request


@final
class LocalWorker:
    """A connection to the worker of this host. Methods raise :class:`LeaseholdError` for a refusal.

    Args:
        path: The socket. None: :func:`socket_path`.
        connect_timeout_s: How long the worker has to answer a connection.
    """

    def __init__(
        self, path: str | Path | None = None, connect_timeout_s: float = LONGEST_CONNECT_TIMEOUT_S
    ) -> None:
        if path == "":  # as a path, it would be the working directory
            raise UsageError("the path of the worker's socket is empty: give one, or None")
        self.path = Path(path) if path is not None else socket_path()
        if len(os.fsencode(self.path)) > SOCKET_PATH_LIMIT_BYTES:
            raise UsageError(
                f"the path of the worker's socket has more than {SOCKET_PATH_LIMIT_BYTES} bytes, which no "
                "socket can have: give another"
            )
        self._channel = grpc.insecure_channel(
            f"unix:{self.path}",
            # The worker identifies a connection by the process that made it, so channels never share one.
            options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.min_reconnect_backoff_ms", int(connect_timeout_s * 1000)),  # one attempt's timeout
                ("grpc.initial_reconnect_backoff_ms", 100),
                ("grpc.max_reconnect_backoff_ms", 1000),  # a late reconnect loses the lease
            ],
        )
        self._stub = LocalServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ends its claims."""
        self._channel.close()

    def list(self) -> ListResponse:
        """The GPUs of this host with their holders, and the queue of claims."""
        with self._decoded():
            return self._stub.List(local_service_pb2.ListRequest(), timeout=CALL_TIMEOUT_S)

    def release(self, workload: str) -> Workload:
        """Releases a claim or an adopted process, by workload id or name, or by lease id."""
        request = build(local_service_pb2.ReleaseRequest, workload=workload)
        with self._decoded():
            return self._stub.Release(request, timeout=RELEASE_TIMEOUT_S).workload

    def claim(self, request: ClaimRequest, timeout_s: float | None = None) -> "LocalStream[ClaimResponse]":
        """Opens a claim, which ends with its stream.

        Args:
            request: The claim.
            timeout_s: Longest duration of the stream. None: no limit.
        """
        return LocalStream(self, self._stub.Claim(request, timeout=timeout_s))

    def serve_kernel(self, requests: Iterator[ServeKernelRequest]) -> "LocalStream[ServeKernelResponse]":
        """Registers the application of the calling process until the stream ends."""
        return LocalStream(self, self._stub.ServeKernel(requests))

    @contextmanager
    def _decoded(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._decode(error) from None  # the gRPC error adds nothing

    def _decode(self, error: grpc.RpcError) -> LeaseholdError:
        refusal = decode_refusal(error)
        if refusal is not None and refusal.reason == "WORKER_DRAINING":
            return NoWorkerError(refusal.message, reason=refusal.reason, code=refusal.code)
        if refusal is not None:
            return refusal
        try:
            check_access(self.path)
        except LeaseholdError as closed:
            return closed
        call = cast("grpc.Call", error)
        if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED or _SILENT in (call.details() or ""):
            return self.silent(call.code())
        if call.code() is grpc.StatusCode.UNIMPLEMENTED:
            return LeaseholdError(
                f"the service at {self.path} lacks this call ({call.details()}): name a worker's socket, and "
                f"not that of a coordinator, with --socket or {SOCKET_VARIABLE}, or upgrade that worker",
                code=call.code(),
            )
        problem = self._problem(call.details() or "")
        return NoWorkerError(
            f"no worker answers at {self.path} ({problem}): start `leasehold worker`, or name its socket "
            f"with --socket or {SOCKET_VARIABLE}",
            code=call.code(),
        )

    def silent(self, code: grpc.StatusCode | None = None) -> NoWorkerError:
        """The error of a worker that did not answer in time."""
        return NoWorkerError(
            f"the worker at {self.path} did not answer in time: a process listens there and does not "
            "respond; look at the process and its log",
            code=code,
        )

    def _problem(self, details: str) -> str:
        """Why nobody answers at the path. The details are those of gRPC."""
        try:
            if not stat.S_ISSOCK(self.path.stat().st_mode):
                return "not a socket"
        except OSError:
            return "no such socket"
        return "nothing listens there" if "Connection refused" in details else details


@final
class LocalStream(Generic[Response]):
    """The responses of a streaming call.

    The reference to gRPC's call is dropped at the end of the call. Otherwise the interpreter's shutdown may
    deadlock on a lock of a thread that has ended.
    """

    def __init__(self, worker: LocalWorker, call: "grpc._CallIterator[Response]") -> None:
        self._worker = worker
        self._call: grpc._CallIterator[Response] | None = call

    def __iter__(self) -> Iterator[Response]:
        """Yields responses until the call ends.

        Raises:
            LeaseholdError: The worker refused the call.
            NoWorkerError: The connection broke.
        """
        if self._call is None:
            return
        with self._worker._decoded():
            yield from self._call

    def on_end(self, callback: Callable[[], None]) -> None:
        """Calls a function at the end of the call, in any thread. If the call has ended: at once."""
        if self._call is None or not self._call.add_callback(callback):
            callback()

    def cancel(self) -> None:
        """Cancels the call."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
