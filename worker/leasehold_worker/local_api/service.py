"""The gRPC side of the local API, in gRPC's threads, with a bridge to trio's thread."""

import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, TypeVar, final

import grpc
import trio
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from leasehold.local.v1 import local_service_pb2
from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason

from leasehold_worker.applications.registry import ApplicationRegistry
from leasehold_worker.applications.stream import ApplicationStream
from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer
from leasehold_worker.local_api.call_limits import CallLimits
from leasehold_worker.local_api.call_threads import CallThreads, stop_server
from leasehold_worker.local_api.claim_stream import ClaimStream
from leasehold_worker.local_api.claims import LocalClaims
from leasehold_worker.local_api.queries import LocalQueries
from leasehold_worker.local_api.refusal_log import RefusalLog
from leasehold_worker.local_api.request_parser import parse
from leasehold_worker.local_api.unix_socket import CONNECTIONS_LIMIT, LocalSocket

logger = logging.getLogger(__name__)

CLAIMS_LIMIT: Final = 256
"""Claims by streams at once. Each takes a thread."""

KERNELS_LIMIT: Final = 64
"""Streams of checkpointable applications at once. Each takes two threads."""

LISTS_LIMIT: Final = 8
"""Lists at once. The event loop makes them."""

OTHER_CALLS_LIMIT: Final = 16
STREAMS_LIMIT: Final = 16
"""Calls of one connection at once; further ones wait in the client."""

FIRST_MESSAGE_TIMEOUT_S: Final = 10.0
"""Time for a call to send its request. Then it is cancelled."""

LOOK_INTERVAL_S: Final = 1.0
SPARE_THREADS: Final = 8
"""Threads for refused calls."""

MESSAGE_LIMIT_BYTES: Final = 262_144
STOP_GRACE_S: Final = 1.0

ERROR_LIMIT: Final = 1500
"""Characters of a refusal: gRPC sends it twice in trailers, which are limited to 8 KiB."""

METADATA_LIMIT: Final = 200
"""Characters of each metadata value in a refusal."""

DOMAIN: Final = "leasehold.dev"
"""``google.rpc.ErrorInfo.domain`` of every refusal."""

_CODES: Final = {
    errors_pb2.ERROR_REASON_INVALID_ARGUMENT: grpc.StatusCode.INVALID_ARGUMENT,
    errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_UNKNOWN_GPU: grpc.StatusCode.NOT_FOUND,
    errors_pb2.ERROR_REASON_UNKNOWN_PROCESS: grpc.StatusCode.NOT_FOUND,
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
"""The gRPC codes of docs/errors.md, for the reasons of this API; the others are FAILED_PRECONDITION."""

Context: TypeAlias = grpc.ServicerContext
Answer = TypeVar("Answer")
Request = TypeVar("Request")


@final
class Mailbox:
    """Unsent messages of a stream, from any thread to gRPC's: only the newest of each kind.

    So its size is bounded however slowly a client reads: every frame has all information of its kind.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unsent: dict[str, local_service_pb2.ClaimResponse | OperationError | None] = {}
        self._closed = False

    def __len__(self) -> int:
        """Number of unsent messages."""
        return len(self._unsent)

    def put(self, response: local_service_pb2.ClaimResponse | OperationError | None) -> None:
        """Adds a message in place of an unsent one of its kind. No message follows None, the end."""
        kind = _kind(response)
        with self._changed:
            if not self._closed:
                self._closed = response is None
                self._unsent.pop(kind, None)
                self._unsent[kind] = response
                self._changed.notify()

    def get(self) -> local_service_pb2.ClaimResponse | OperationError | None:
        """Waits for the next message, and removes it."""
        with self._changed:
            while not self._unsent:
                self._changed.wait()
            return self._unsent.pop(next(iter(self._unsent)))


def _kind(response: local_service_pb2.ClaimResponse | OperationError | None) -> str:
    match response:
        case local_service_pb2.ClaimResponse():
            return response.WhichOneof("frame") or ""
        case OperationError():
            return "refusal"
        case None:
            return "end"


@final
class LocalService:
    """Serves the processes of this host.

    Every method takes a stream of requests, even for a single request, which is the same on the wire:
    otherwise gRPC would block a thread for the request before the service can refuse the call.
    """

    def __init__(
        self,
        local_socket: LocalSocket,
        claims: LocalClaims,
        answers: LocalQueries,
        applications: ApplicationRegistry,
        token: trio.lowlevel.TrioToken,
        threads: CallThreads,
    ) -> None:
        self._socket = local_socket
        self._claims = claims
        self._answers = answers
        self._applications = applications
        self._token = token
        self._threads = threads
        self._calls = CallLimits(CLAIMS_LIMIT + KERNELS_LIMIT + OTHER_CALLS_LIMIT, "calls")
        self._claims_open = CallLimits(CLAIMS_LIMIT, "claims")
        self._kernels_open = CallLimits(KERNELS_LIMIT, "applications that serve kernels")
        self._lists_open = CallLimits(LISTS_LIMIT, "lists")
        self._refusals = RefusalLog()
        self._unasked: dict[Context, float] = {}
        """Calls without a request so far, with their start times."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """The methods, for gRPC."""
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {  # gRPC types no mixture of methods
            "Claim": grpc.stream_stream_rpc_method_handler(
                self.claim,
                request_deserializer=partial(parse, local_service_pb2.ClaimRequest),
                response_serializer=local_service_pb2.ClaimResponse.SerializeToString,
            ),
            "ServeKernel": grpc.stream_stream_rpc_method_handler(
                self.serve_kernel,
                request_deserializer=partial(parse, local_service_pb2.ServeKernelRequest),
                response_serializer=local_service_pb2.ServeKernelResponse.SerializeToString,
            ),
            "List": grpc.stream_unary_rpc_method_handler(
                self.list,
                request_deserializer=partial(parse, local_service_pb2.ListRequest),
                response_serializer=local_service_pb2.ListResponse.SerializeToString,
            ),
            "Release": grpc.stream_unary_rpc_method_handler(
                self.release,
                request_deserializer=partial(parse, local_service_pb2.ReleaseRequest),
                response_serializer=local_service_pb2.ReleaseResponse.SerializeToString,
            ),
        }
        service = local_service_pb2.DESCRIPTOR.services_by_name["LocalService"].full_name
        return grpc.method_handlers_generic_handler(service, methods)

    async def cancel_unasked(self) -> None:
        """Cancels calls without a request in time, and serves those that waited for threads."""
        while True:
            await trio.sleep(LOOK_INTERVAL_S)
            self._threads.fill()
            latest = time.monotonic() - FIRST_MESSAGE_TIMEOUT_S
            for context, since in list(self._unasked.items()):
                if since < latest:
                    context.cancel()

    def claim(
        self, requests: Iterator[local_service_pb2.ClaimRequest], context: Context
    ) -> Iterator[local_service_pb2.ClaimResponse]:
        """Waits for a claim's grant, and holds the lease as long as the call lasts."""
        with self._admitted(context, self._calls, self._claims_open) as peer:
            yield from self._serve_claim(peer, self._first(requests, context), context)

    def _serve_claim(
        self, peer: Peer, request: local_service_pb2.ClaimRequest, context: Context
    ) -> Iterator[local_service_pb2.ClaimResponse]:
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
                self._refuse(context, peer, "Claim", response)
            yield response

    def serve_kernel(
        self, requests: Iterator[local_service_pb2.ServeKernelRequest], context: Context
    ) -> Iterator[local_service_pb2.ServeKernelResponse]:
        """Sends requests to a checkpointable application, as long as the call lasts."""
        with self._admitted(context, self._calls, self._kernels_open) as peer:
            yield from self._serve_kernel(peer, requests, context)

    def _serve_kernel(
        self, peer: Peer, requests: Iterator[local_service_pb2.ServeKernelRequest], context: Context
    ) -> Iterator[local_service_pb2.ServeKernelResponse]:
        session = ApplicationStream(peer)
        if not context.add_callback(lambda: self._soon(session.drop)):
            return
        self._soon(partial(self._applications.begin, session))
        self._threads.submit(self._read_kernel, session, requests)
        while (frame := self._wait(session.hand_out)) is not None:
            if isinstance(frame, OperationError):
                self._refuse(context, peer, "ServeKernel", frame)
            yield frame

    def _read_kernel(
        self, session: ApplicationStream, requests: Iterator[local_service_pb2.ServeKernelRequest]
    ) -> None:
        """Reads until either side ends the stream."""
        try:
            for frame in requests:
                if not self._wait(partial(session.take_in, frame)):
                    return
        except grpc.RpcError:
            pass
        self._soon(session.close)

    def _wait(self, question: Callable[[], Awaitable[Answer]]) -> Answer | None:
        """Waits for an answer of trio's thread. None: the worker has ended."""
        try:
            return trio.from_thread.run(question, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            return None

    def list(
        self, requests: Iterator[local_service_pb2.ListRequest], context: Context
    ) -> local_service_pb2.ListResponse:
        """Lists leases, workloads and claims."""
        with self._admitted(context, self._calls, self._lists_open) as peer:
            self._first(requests, context)
            return self._ask(context, partial(self._answers.list, peer))

    def release(
        self, requests: Iterator[local_service_pb2.ReleaseRequest], context: Context
    ) -> local_service_pb2.ReleaseResponse:
        """Releases a claim or an adopted process."""
        with self._admitted(context, self._calls) as peer:
            name = self._first(requests, context).workload
            try:
                released = self._ask(context, partial(self._answers.release, peer, name))
            except OperationError as error:
                self._refuse(context, peer, "Release", error)
            return local_service_pb2.ReleaseResponse(workload=released)

    def _refuse(self, context: Context, peer: Peer, method: str, error: OperationError) -> NoReturn:
        """Ends a call with a refusal, and logs a refusal for lack of a right or because of a rate."""
        if error.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED or "bound" in error.metadata:
            who = f"process {peer.identity.pid} of user {peer.user} (uid {peer.uid})"
            self._refusals.note(peer.uid, method, f"refused {method} to {who}: {error.message}")
        _abort(context, error)

    @contextmanager
    def _admitted(self, context: Context, *kinds: CallLimits) -> Iterator[Peer]:
        """Counts a call against its limits, and refuses it at the limit."""
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
        """The request of a call. A call without a request in time is cancelled."""
        self._unasked[context] = time.monotonic()
        try:
            request = next(requests, None)
        finally:
            del self._unasked[context]
        if request is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a request: send one")
        return request

    def _ask(self, context: Context, question: Callable[[], Awaitable[Answer]]) -> Answer:
        try:
            return trio.from_thread.run(question, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
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
    """Serves the local API in the context. Its threads end with it.

    Claims with a stream can be resumed for a while after the next start of the worker.
    """
    calls = CLAIMS_LIMIT + KERNELS_LIMIT + OTHER_CALLS_LIMIT
    threads = CallThreads(calls + KERNELS_LIMIT + SPARE_THREADS, "local-api")
    server = grpc.server(
        threads,  # type: ignore[arg-type]  # gRPC only submits calls
        # The limit of all connections together. CallLimits decides which calls are served.
        maximum_concurrent_rpcs=CONNECTIONS_LIMIT * STREAMS_LIMIT,
        options=[
            ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
            ("grpc.max_concurrent_streams", STREAMS_LIMIT),
        ],
    )
    token = trio.lowlevel.current_trio_token()
    service = LocalService(local_socket, claims, answers, applications, token, threads)
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
        await stop_server(server, threads, STOP_GRACE_S)


def _abort(context: Context, error: OperationError) -> NoReturn:
    """Ends a call with a refusal, in the form of the coordinator's API."""
    reason = ErrorReason.Name(error.reason).removeprefix("ERROR_REASON_")
    facts = {name: fact[:METADATA_LIMIT] for name, fact in error.metadata.items()}
    info = error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=facts)
    detail = any_pb2.Any()
    detail.Pack(info)
    code = _CODES.get(error.reason, grpc.StatusCode.FAILED_PRECONDITION)
    status = status_pb2.Status(code=code.value[0], message=error.message[:ERROR_LIMIT], details=[detail])
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")
