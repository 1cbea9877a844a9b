"""The gRPC side of the local API, in gRPC's threads. What is asked is done on trio's, and bridged here."""

import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, NoReturn, TypeAlias, TypeVar, final

import grpc
import trio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from leasehold.v1 import errors_pb2, local_pb2
from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.local_pb2_grpc import LocalServiceServicer, add_LocalServiceServicer_to_server

from leasehold_worker.claim_turns import Session
from leasehold_worker.errors import OperationError
from leasehold_worker.kernel_session import KernelSession
from leasehold_worker.kernels import Kernels
from leasehold_worker.local_answers import LocalAnswers
from leasehold_worker.local_claims import LocalClaims
from leasehold_worker.local_socket import LocalSocket, Peer

logger = logging.getLogger(__name__)

CLAIMS_LIMIT: Final = 256
"""Claims by streams at once. Each takes a thread."""

KERNELS_LIMIT: Final = 64
"""Streams of applications that save themselves at once. Each takes two threads."""

OTHER_CALLS_LIMIT: Final = 16
MESSAGE_LIMIT_BYTES: Final = 262_144
STOP_GRACE_S: Final = 1.0

ERROR_LIMIT: Final = 1500
"""Characters of a refusal: gRPC sends it in trailers, twice, and 8 KiB of them are taken."""

METADATA_LIMIT: Final = 200
"""Characters of each fact in a refusal."""

_CODES: Final = {
    errors_pb2.ERROR_REASON_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_UNKNOWN_GPU: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_WORKLOAD_EXISTS: grpc.StatusCode.ALREADY_EXISTS,
    errors_pb2.ERROR_REASON_ALREADY_REGISTERED: grpc.StatusCode.ALREADY_EXISTS,
    errors_pb2.ERROR_REASON_NOT_PERMITTED: grpc.StatusCode.PERMISSION_DENIED,
    errors_pb2.ERROR_REASON_NO_FREE_GPU: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors_pb2.ERROR_REASON_WORKER_DRAINING: grpc.StatusCode.UNAVAILABLE,
    errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY: grpc.StatusCode.UNIMPLEMENTED,
    errors_pb2.ERROR_REASON_INTERNAL: grpc.StatusCode.INTERNAL,
}
"""What a reason is for gRPC; others are FAILED_PRECONDITION."""

Context: TypeAlias = grpc.ServicerContext
Answer = TypeVar("Answer")


@final
class Mailbox:
    """What is to be sent by a stream, from any thread to gRPC's: of each kind only the newest that is unsent.

    So it is bounded, however slowly a claimant reads: every frame says all that its kind has to say.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unsent: dict[str, local_pb2.ClaimResponse | OperationError | None] = {}
        self._closed = False

    def __len__(self) -> int:
        """How many are unsent."""
        return len(self._unsent)

    def put(self, response: local_pb2.ClaimResponse | OperationError | None) -> None:
        """Adds one in place of an unsent one of its kind. Nothing comes behind None, the end."""
        kind = _kind(response)
        with self._changed:
            if not self._closed:
                self._closed = response is None
                self._unsent.pop(kind, None)
                self._unsent[kind] = response
                self._changed.notify()

    def get(self) -> local_pb2.ClaimResponse | OperationError | None:
        """Waits for the next one, and takes it out."""
        with self._changed:
            while not self._unsent:
                self._changed.wait()
            return self._unsent.pop(next(iter(self._unsent)))


def _kind(response: local_pb2.ClaimResponse | OperationError | None) -> str:
    match response:
        case local_pb2.ClaimResponse():
            return response.WhichOneof("frame") or ""
        case OperationError():
            return "refusal"
        case None:
            return "end"


@final
class LocalService(LocalServiceServicer):
    """Serves the processes of this host."""

    def __init__(
        self,
        local_socket: LocalSocket,
        claims: LocalClaims,
        answers: LocalAnswers,
        kernels: Kernels,
        token: trio.lowlevel.TrioToken,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._socket = local_socket
        self._claims = claims
        self._answers = answers
        self._kernels = kernels
        self._token = token
        self._executor = executor
        self._places = threading.Semaphore(CLAIMS_LIMIT)
        self._kernel_places = threading.Semaphore(KERNELS_LIMIT)

    def Claim(  # noqa: D102, N802 - the protos say it
        self, request: local_pb2.ClaimRequest, context: Context
    ) -> Iterator[local_pb2.ClaimResponse]:
        peer = self._peer(context)
        if not self._places.acquire(blocking=False):
            _abort(context, _FULL)
        try:
            yield from self._serve_claim(peer, request, context)
        finally:
            self._places.release()

    def _serve_claim(
        self, peer: Peer, request: local_pb2.ClaimRequest, context: Context
    ) -> Iterator[local_pb2.ClaimResponse]:
        responses = Mailbox()
        session = Session(peer, request, responses.put)

        def leave() -> None:
            responses.put(None)
            self._soon(session.close)

        if not context.add_callback(leave):
            return
        self._soon(partial(self._claims.begin, session))
        while (response := responses.get()) is not None:
            if isinstance(response, OperationError):
                _abort(context, response)
            yield response

    def ServeKernel(  # noqa: D102, N802
        self, request_iterator: Iterator[local_pb2.ServeKernelRequest], context: Context
    ) -> Iterator[local_pb2.ServeKernelResponse]:
        peer = self._peer(context)
        if not self._kernel_places.acquire(blocking=False):
            _abort(context, _FULL_OF_KERNELS)
        try:
            yield from self._serve_kernel(peer, request_iterator, context)
        finally:
            self._kernel_places.release()

    def _serve_kernel(
        self, peer: Peer, requests: Iterator[local_pb2.ServeKernelRequest], context: Context
    ) -> Iterator[local_pb2.ServeKernelResponse]:
        session = KernelSession(peer)
        if not context.add_callback(lambda: self._soon(session.drop)):
            return
        self._soon(partial(self._kernels.begin, session))
        self._executor.submit(self._read_kernel, session, requests)
        while (frame := self._wait(session.hand_out)) is not None:
            if isinstance(frame, OperationError):
                _abort(context, frame)
            yield frame

    def _read_kernel(self, session: KernelSession, requests: Iterator[local_pb2.ServeKernelRequest]) -> None:
        """Reads until the stream is over, by whichever side."""
        try:
            for frame in requests:
                if not self._wait(partial(session.take_in, frame)):
                    return
        except grpc.RpcError:
            pass
        self._soon(session.close)

    def _wait(self, question: Callable[[], Awaitable[Answer]]) -> Answer | None:
        """Waits for an answer of trio's. None: the worker has ended."""
        try:
            return trio.from_thread.run(question, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            return None

    def List(  # noqa: D102, N802
        self, request: local_pb2.ListRequest, context: Context
    ) -> local_pb2.ListResponse:
        self._peer(context)
        return self._ask(context, self._answers.list)

    def Release(  # noqa: D102, N802
        self, request: local_pb2.ReleaseRequest, context: Context
    ) -> local_pb2.ReleaseResponse:
        peer = self._peer(context)
        try:
            released = trio.from_thread.run(
                self._answers.release, peer, request.workload, trio_token=self._token
            )
        except OperationError as error:
            _abort(context, error)
        except trio.RunFinishedError:
            _abort(context, _STOPPING)
        return local_pb2.ReleaseResponse(workload=released)

    def _peer(self, context: Context) -> Peer:
        peer = self._socket.peer(context.peer())
        if peer is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "use the worker's socket")
        return peer

    def _ask(self, context: Context, question: Callable[[], Answer]) -> Answer:
        try:
            return trio.from_thread.run_sync(question, trio_token=self._token)
        except trio.RunFinishedError:
            _abort(context, _STOPPING)

    def _soon(self, call: Callable[[], None]) -> None:
        try:
            self._token.run_sync_soon(call)
        except trio.RunFinishedError:
            logger.debug("the worker has ended")


_STOPPING: Final = OperationError(
    errors_pb2.ERROR_REASON_WORKER_DRAINING, "the worker is stopping: try again once it is back"
)


_FULL: Final = OperationError(
    errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
    f"{CLAIMS_LIMIT} claims wait or hold on already, as many as a worker serves: wait until one ends",
)

_FULL_OF_KERNELS: Final = OperationError(
    errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
    f"{KERNELS_LIMIT} applications serve kernels already, as many as a worker calls: wait until one ends",
)


@asynccontextmanager
async def serve_locally(
    local_socket: LocalSocket, claims: LocalClaims, answers: LocalAnswers, kernels: Kernels
) -> AsyncIterator[None]:
    """Serves the local API for as long as the context lasts. Its threads end with it.

    Whoever holds a claim by a stream has a while to come back to the next start of the worker.
    """
    calls = CLAIMS_LIMIT + KERNELS_LIMIT + OTHER_CALLS_LIMIT
    executor = ThreadPoolExecutor(calls + KERNELS_LIMIT, thread_name_prefix="local-api")
    server = grpc.server(
        executor,
        maximum_concurrent_rpcs=calls,
        options=[("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES)],
    )
    token = trio.lowlevel.current_trio_token()
    service = LocalService(local_socket, claims, answers, kernels, token, executor)
    add_LocalServiceServicer_to_server(service, server)
    server.add_insecure_port(local_socket.inner_address)
    server.start()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(local_socket.run)
            try:
                yield
            finally:
                claims.suspend_streams()
                kernels.close()
                nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(server.stop(STOP_GRACE_S).wait, 2 * STOP_GRACE_S)
            await trio.to_thread.run_sync(executor.shutdown)


def _abort(context: Context, error: OperationError) -> NoReturn:
    """Ends a call with a refusal, in the form that the coordinator's API has."""
    reason = ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
    facts = {name: fact[:METADATA_LIMIT] for name, fact in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=reason, domain="leasehold", metadata=facts)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = _CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION)
    status = status_pb2.Status(code=code.value[0], message=error.message[:ERROR_LIMIT], details=[detail])
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")
