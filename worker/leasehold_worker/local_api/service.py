"""The gRPC side of the local API, in gRPC's threads. What is asked is done on trio's, and bridged here."""

import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, final

import grpc
import trio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from leasehold.v1 import errors_pb2, local_pb2
from leasehold.v1.errors_pb2 import ErrorReason

from leasehold_worker.applications.registry import ApplicationRegistry
from leasehold_worker.applications.stream import ApplicationStream
from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer
from leasehold_worker.local_api.call_limits import CallLimits
from leasehold_worker.local_api.claim_stream import ClaimStream
from leasehold_worker.local_api.claims import LocalClaims
from leasehold_worker.local_api.queries import LocalQueries
from leasehold_worker.local_api.unix_socket import CONNECTIONS_LIMIT, LocalSocket

logger = logging.getLogger(__name__)

CLAIMS_LIMIT: Final = 256
"""Claims by streams at once. Each takes a thread."""

KERNELS_LIMIT: Final = 64
"""Streams of applications that save themselves at once. Each takes two threads."""

OTHER_CALLS_LIMIT: Final = 16
STREAMS_LIMIT: Final = 16
"""Calls of one connection at once; further ones wait in the client."""

FIRST_MESSAGE_TIMEOUT_S: Final = 10.0
"""How long a call may be open without its request. Then it is cancelled."""

LOOK_INTERVAL_S: Final = 1.0
SPARE_THREADS: Final = 8
"""Threads for calls that are refused."""

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
Request = TypeVar("Request")


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
class LocalService:
    """Serves the processes of this host.

    Every method takes a stream of requests, also where the API has a single one, which is the same on the
    wire: gRPC would keep a thread waiting for a call's request before we are asked whether the call may be.
    """

    def __init__(
        self,
        local_socket: LocalSocket,
        claims: LocalClaims,
        answers: LocalQueries,
        applications: ApplicationRegistry,
        token: trio.lowlevel.TrioToken,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._socket = local_socket
        self._claims = claims
        self._answers = answers
        self._applications = applications
        self._token = token
        self._executor = executor
        self._calls = CallLimits(CLAIMS_LIMIT + KERNELS_LIMIT + OTHER_CALLS_LIMIT, "calls")
        self._claims_open = CallLimits(CLAIMS_LIMIT, "claims")
        self._kernels_open = CallLimits(KERNELS_LIMIT, "applications that serve kernels")
        self._unasked: dict[Context, float] = {}
        """Calls of which the request has not come, and when they opened."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """The methods, for gRPC."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {  # gRPC types no mixture of methods
            "Claim": grpc.stream_stream_rpc_method_handler(
                self.claim,
                request_deserializer=local_pb2.ClaimRequest.FromString,
                response_serializer=local_pb2.ClaimResponse.SerializeToString,
            ),
            "ServeKernel": grpc.stream_stream_rpc_method_handler(
                self.serve_kernel,
                request_deserializer=local_pb2.ServeKernelRequest.FromString,
                response_serializer=local_pb2.ServeKernelResponse.SerializeToString,
            ),
            "List": grpc.stream_unary_rpc_method_handler(
                self.list,
                request_deserializer=local_pb2.ListRequest.FromString,
                response_serializer=local_pb2.ListResponse.SerializeToString,
            ),
            "Release": grpc.stream_unary_rpc_method_handler(
                self.release,
                request_deserializer=local_pb2.ReleaseRequest.FromString,
                response_serializer=local_pb2.ReleaseResponse.SerializeToString,
            ),
        }
        service = local_pb2.DESCRIPTOR.services_by_name["LocalService"].full_name
        return grpc.method_handlers_generic_handler(service, methods)

    async def cancel_unasked(self) -> None:
        """Cancels calls whose request does not come, until cancelled itself."""
        while True:
            await trio.sleep(LOOK_INTERVAL_S)
            latest = time.monotonic() - FIRST_MESSAGE_TIMEOUT_S
            for context, since in list(self._unasked.items()):
                if since < latest:
                    context.cancel()

    def claim(
        self, requests: Iterator[local_pb2.ClaimRequest], context: Context
    ) -> Iterator[local_pb2.ClaimResponse]:
        """Waits for what a process claims, and holds it as long as the call lasts."""
        with self._admitted(context, self._calls, self._claims_open) as peer:
            yield from self._serve_claim(peer, self._first(requests, context), context)

    def _serve_claim(
        self, peer: Peer, request: local_pb2.ClaimRequest, context: Context
    ) -> Iterator[local_pb2.ClaimResponse]:
        responses = Mailbox()
        session = ClaimStream(peer, request, responses.put)

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

    def serve_kernel(
        self, requests: Iterator[local_pb2.ServeKernelRequest], context: Context
    ) -> Iterator[local_pb2.ServeKernelResponse]:
        """Asks an application to save itself, for as long as the call lasts."""
        with self._admitted(context, self._calls, self._kernels_open) as peer:
            yield from self._serve_kernel(peer, requests, context)

    def _serve_kernel(
        self, peer: Peer, requests: Iterator[local_pb2.ServeKernelRequest], context: Context
    ) -> Iterator[local_pb2.ServeKernelResponse]:
        session = ApplicationStream(peer)
        if not context.add_callback(lambda: self._soon(session.drop)):
            return
        self._soon(partial(self._applications.begin, session))
        self._executor.submit(self._read_kernel, session, requests)
        while (frame := self._wait(session.hand_out)) is not None:
            if isinstance(frame, OperationError):
                _abort(context, frame)
            yield frame

    def _read_kernel(
        self, session: ApplicationStream, requests: Iterator[local_pb2.ServeKernelRequest]
    ) -> None:
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

    def list(self, requests: Iterator[local_pb2.ListRequest], context: Context) -> local_pb2.ListResponse:
        """Says who has what."""
        with self._admitted(context, self._calls):
            self._first(requests, context)
            return self._ask(context, self._answers.list)

    def release(
        self, requests: Iterator[local_pb2.ReleaseRequest], context: Context
    ) -> local_pb2.ReleaseResponse:
        """Lets a claim or an adopted process go."""
        with self._admitted(context, self._calls) as peer:
            name = self._first(requests, context).workload
            try:
                released = trio.from_thread.run(self._answers.release, peer, name, trio_token=self._token)
            except OperationError as error:
                _abort(context, error)
            except trio.RunFinishedError:
                _abort(context, _STOPPING)
            return local_pb2.ReleaseResponse(workload=released)

    @contextmanager
    def _admitted(self, context: Context, *kinds: CallLimits) -> Iterator[Peer]:
        """Takes a place of each kind for a call. It is refused where there is none for its user."""
        peer = self._socket.peer(context.peer())
        if peer is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "use the worker's socket")
        with ExitStack() as places:
            try:
                for kind in kinds:
                    places.enter_context(kind.taken(peer))
            except OperationError as error:
                _abort(context, error)
            yield peer

    def _first(self, requests: Iterator[Request], context: Context) -> Request:
        """The request of a call that has one. A call that does not say it in time is cancelled."""
        self._unasked[context] = time.monotonic()
        try:
            request = next(requests, None)
        finally:
            del self._unasked[context]
        if request is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a request: send one")
        return request

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


@asynccontextmanager
async def serve_locally(
    local_socket: LocalSocket, claims: LocalClaims, answers: LocalQueries, applications: ApplicationRegistry
) -> AsyncIterator[None]:
    """Serves the local API for as long as the context lasts. Its threads end with it.

    Whoever holds a claim by a stream has a while to come back to the next start of the worker.
    """
    calls = CLAIMS_LIMIT + KERNELS_LIMIT + OTHER_CALLS_LIMIT
    threads = calls + KERNELS_LIMIT + SPARE_THREADS
    executor = ThreadPoolExecutor(threads, thread_name_prefix="local-api")
    server = grpc.server(
        executor,
        # What connections allow together: which calls are served is decided by who makes them.
        maximum_concurrent_rpcs=CONNECTIONS_LIMIT * STREAMS_LIMIT,
        options=[
            ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
            ("grpc.max_concurrent_streams", STREAMS_LIMIT),
        ],
    )
    token = trio.lowlevel.current_trio_token()
    service = LocalService(local_socket, claims, answers, applications, token, executor)
    server.add_generic_rpc_handlers((service.handlers(),))
    server.add_insecure_port(local_socket.inner_address)
    server.start()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(local_socket.run)
            nursery.start_soon(service.cancel_unasked)
            try:
                yield
            finally:
                claims.suspend_streams()
                applications.close()
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
