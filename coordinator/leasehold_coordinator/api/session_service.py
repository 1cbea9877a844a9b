"""The stream of a worker: hello, welcome, then frames in both directions until one side ends the session."""

import asyncio
import logging
import random
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, Final, final
from weakref import WeakValueDictionary

import grpc
from google.protobuf.message import DecodeError
from leasehold.v1 import errors_pb2
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import (
    ConnectRequest,
    ConnectResponse,
    Goodbye,
    Heartbeat,
    Hello,
    ProtocolVersion,
    Welcome,
    WorkerLoad,
)
from leasehold.worker.v1.session_pb2_grpc import SessionServiceServicer

from leasehold_coordinator import __version__, metrics
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity
from leasehold_coordinator.access.worker_bindings import WorkerBinding
from leasehold_coordinator.api.authentication import Authentication, is_encrypted
from leasehold_coordinator.api.error_statuses import abort
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.core.hello_rules import check_hello, check_values
from leasehold_coordinator.crash_points import crash_point
from leasehold_coordinator.errors import STORE_FAILURES, FleetError
from leasehold_coordinator.fleet.audit_entries import CONNECT
from leasehold_coordinator.fleet.authority_changes import tell_authorities
from leasehold_coordinator.fleet.callers import SESSION_LIMIT, CallLimits, host_of
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.frame_rules import check_leases, check_workload_of
from leasehold_coordinator.fleet.hello_bounds import HelloBounds
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.shielded_tasks import finish
from leasehold_coordinator.timestamps import duration, timestamp

logger = logging.getLogger(__name__)

PROTOCOL_VERSION: Final = ProtocolVersion(major=1, minor=9)
TRANSIENT: Final = (
    *STORE_FAILURES,
    errors_pb2.ERROR_REASON_WORKER_CONNECTED,
    errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
    errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
)
"""Transient reasons, such as a full disk, an older stream that has not ended yet, or a late hello."""

ABORTING: Final = (*TRANSIENT, errors_pb2.ERROR_REASON_UNAUTHENTICATED)
"""Reasons that end the call by its status, before a session exists."""

HELLO_TIMEOUT_S: Final = 10.0
"""How long a stream may take to send hello."""

HELLO_LIMIT: Final = 4_096
"""Most concurrent streams that have not sent hello yet."""

FLUSH_TIMEOUT_S: Final = 2.0
SILENCE_INTERVALS: Final = 12
"""Load intervals without any frame after which a worker reconnects."""

HEARTBEAT_LOADS: Final = 3
"""Loads between two heartbeats to a worker. A timer for each of thousands of streams would cost more."""

INTERVAL_CHANGE: Final = 0.2
"""The relative change of the load interval from which on a worker is told the new interval."""

STORAGE_PAUSE_S: Final = (2.0, 6.0)
"""Least and most delay before a worker reconnects after its reports could not be stored."""

TAKEOVER_WAIT_S: Final = 2.0
"""How long a new instance of a worker waits for the stream of a killed instance to end."""

Context = grpc.aio.ServicerContext[ConnectRequest, ConnectResponse]


@final
class SessionService(SessionServiceServicer):
    """Serves the workers' streams."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher, authentication: Authentication) -> None:
        self._authentication = authentication
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By worker id, while one of its streams is admitted."""
        self._streams, self._hellos = CallLimits(SESSION_LIMIT), CallLimits(HELLO_LIMIT)
        self._bounds = HelloBounds()

    async def Connect(  # type: ignore[override]  # a coroutine: it reads and writes by context
        self, request_iterator: object, context: Context
    ) -> None:
        caller: Caller | None = None
        try:
            caller = self._authentication.worker(context)
            if caller is not None:
                self._bounds.admit(caller.identity)
            # The stream counts until gRPC ends the call, which needs a peer that reads everything sent.
            counted = str(caller.identity) if caller is not None else host_of(context.peer())
            leave = self._streams.enter(counted)
            context.add_done_callback(lambda _: leave())  # type: ignore[arg-type]  # any callable will do
            with self._hellos.entered(counted):
                session = Session(await _read_hello(context))  # no variable keeps the whole hello in memory
            session.address, session.is_encrypted = host_of(context.peer()), is_encrypted(context)
            self._check(session.hello)
            if caller is None:
                caller = self._authentication.token_worker(context, session.hello.name)
                self._bounds.admit(caller.identity)
            session.identity, session.is_certified = caller.identity, bool(caller.serial)
            _check_name(session.hello, caller.identity)
        except FleetError as error:
            self._audit(error, context, caller.identity if caller is not None else None)
            is_told = self._fleet.refusals.may_tell(context.peer())
            if is_told:
                logger.warning("refused a worker: %s", error.message)
            if error.reason in ABORTING:
                ending = abort(context, error)
                del context  # see abort
                await ending
            if is_told:
                self._fleet.events.refused(error)
            refusal = Goodbye(reason=session_pb2.GOODBYE_REASON_REFUSED, error=error.to_proto())
            await _send(context, ConnectResponse(goodbye=refusal))
            return
        try:
            with self._authentication.calls.entered(caller, partial(self._end_refused, session)):
                await finish(self._welcome(session))
                await self._converse(session, context)
        except FleetError as error:
            self._audit(error, context, session.identity, session)
            is_told = self._fleet.refusals.may_tell(context.peer())
            if is_told:
                logger.error("refused worker %s: %s", session.hello.name, error.message)
            if error.reason in TRANSIENT:
                await abort(context, error)  # not a refusal: the worker tries again, with backoff
            if is_told:
                self._fleet.events.refused(error, session.hello.worker_id, session.hello.name)
            refusal = Goodbye(reason=session_pb2.GOODBYE_REASON_REFUSED, error=error.to_proto())
            await _send(context, ConnectResponse(goodbye=refusal))
        finally:
            self._forget(session)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service with a server.

        The generated function would end a stream with a malformed frame without an error message.
        """
        handler = grpc.stream_stream_rpc_method_handler(
            self.Connect,
            request_deserializer=_parse,
            response_serializer=ConnectResponse.SerializeToString,
        )
        name = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Connect": handler}),))

    def _audit(
        self, error: FleetError, context: Context, identity: Identity | None, session: Session | None = None
    ) -> None:
        """Counts a refusal for the audit. The resource is the worker that the hello names."""
        address = host_of(context.peer())
        caller = Caller(identity, address) if identity is not None else None
        resources = [f"worker/{session.hello.name}"] if session is not None else []
        self._fleet.audit.note(error, CONNECT, address, caller=caller, resources=resources)

    def _check(self, hello: Hello) -> None:
        theirs = hello.protocol_version
        if theirs.major != PROTOCOL_VERSION.major:
            ours_text, theirs_text = (f"{v.major}.{v.minor}" for v in (PROTOCOL_VERSION, theirs))
            raise FleetError(
                errors_pb2.ERROR_REASON_PROTOCOL_VERSION,
                f"the worker has protocol {theirs_text} and the coordinator {ours_text}: update the older",
                worker=theirs_text,
                coordinator=ours_text,
            )
        check_values(hello)
        check_hello(hello)

    async def _welcome(self, session: Session) -> None:
        """Admits a worker's stream. Concurrent streams of one worker are admitted one after the other.

        A hello is valid only during its own stream. If the stream has ended meanwhile, the hello is ignored.

        Raises:
            FleetError: A refusal of :meth:`Registry.check_newcomer`, or STORAGE_UNAVAILABLE.
        """
        await self._wait_for_older(session.hello)
        turn = self._turns.setdefault(session.hello.worker_id, asyncio.Lock())
        async with turn:
            hello, is_certified = session.hello, session.is_certified
            async with self._fleet.new_binding(hello, is_certified=is_certified) as binding:
                if session.ended.done():
                    return
                await self._let_in(session, binding)
            await self._compare(session)

    async def _wait_for_older(self, hello: Hello) -> None:
        """Waits for the stream of a killed instance to end."""
        older = self._fleet.sessions.get(hello.worker_id)
        if older is not None and self._fleet.registry.is_taken(hello, time.monotonic()):
            await asyncio.wait({older.ended}, timeout=TAKEOVER_WAIT_S)

    async def _let_in(self, session: Session, binding: WorkerBinding | None) -> None:
        """Ends the worker's older stream, and stores the new epoch and binding."""
        fleet, hello = self._fleet, session.hello
        fleet.registry.check_newcomer(hello, time.monotonic())
        _check_own(fleet, hello)
        crash_point("hello-received")
        session.epoch = fleet.registry.next_epoch(hello)
        session.is_restored = fleet.registry.is_restored(hello)
        older = fleet.sessions.get(hello.worker_id)
        robbed = fleet.registry.take_gpus(hello)
        session.known = fleet.registry.welcome(
            hello, session.epoch, session.session_id, time.monotonic(), time.time_ns()
        )
        session.known.is_encrypted = session.is_encrypted
        # The welcome is queued before any other frame, and sent once all changes by the hello are stored.
        session.send(ConnectResponse(welcome=self._welcome_frame(session)))
        if len(self._authentication.certificates.authorities.members) > 1:
            tell_authorities(self._authentication.certificates, session)
        fleet.sessions[hello.worker_id] = session
        session.earlier = frozenset(fleet.ledger.stored_of_worker(hello.worker_id))
        if older is not None:
            older.end(session_pb2.GOODBYE_REASON_SUPERSEDED)
        await fleet.save_worker(hello, session.epoch, robbed, binding, session.address)
        crash_point("epoch-stored")
        metrics.SESSIONS.inc()
        logger.info("worker %s (%s) connected, epoch %d", hello.name, hello.worker_id, session.epoch)

    async def _compare(self, session: Session) -> None:
        """Compares the hello of a worker that was let in with the records of its workloads and commands."""
        await self._dispatcher.reconcile_workloads(session, session.hello.workloads)
        await self._dispatcher.welcome(session)
        if session.known is not None:
            session.hello = session.known.hello  # frees the volatile fields, which are kept elsewhere by now
            self._fleet.registry.applied(session.known)
            if self._fleet.reader.is_current(session):
                self._fleet.worker_news.publish(session.known)
        crash_point("welcomed")

    def _welcome_frame(self, session: Session) -> Welcome:
        interval_s = session.known.load_interval_s if session.known is not None else 0.0
        return Welcome(
            session_id=session.session_id,
            epoch=session.epoch,
            protocol_version=PROTOCOL_VERSION,
            coordinator_version=__version__,
            load_interval=duration(interval_s),
            silence_limit=duration(SILENCE_INTERVALS * interval_s),
            open_command_ids=self._fleet.ledger.stored_of_worker(session.hello.worker_id),
            time=timestamp(time.time_ns()),
        )

    def _end_refused(self, session: Session, refusal: FleetError) -> None:
        """Ends the session of a worker whose credential is refused by now."""
        hello = session.hello
        logger.warning("the session of worker %s ends: %s", hello.name, refusal.message)
        self._fleet.events.refused(refusal, hello.worker_id, hello.name)
        if session.known is not None:
            session.known.refusal = refusal.message
        session.end(session_pb2.GOODBYE_REASON_REFUSED, refusal)

    def _forget(self, session: Session) -> None:
        session.end()
        worker_id = session.hello.worker_id
        if self._fleet.sessions.get(worker_id) is session:
            del self._fleet.sessions[worker_id]
        known = session.known
        if known is not None and self._fleet.registry.disconnect(
            known, session.session_id, left=session.left
        ):
            logger.info("worker %s %s", session.hello.name, "left" if session.left else "lost its stream")
            self._fleet.worker_news.publish(known)

    async def _converse(self, session: Session, context: Context) -> None:
        """Reads frames until the session ends, and then sends the queued frames.

        gRPC can neither cancel a write nor end a call before its last write. A peer that does not read keeps
        its stream open, but its session has ended.
        """
        try:
            async with asyncio.timeout(None) as reading:
                session.open(partial(_send, context), partial(reading.reschedule, 0.0))
                await self._read(session, context)
        except TimeoutError:  # the session has ended, if the timeout above expired
            if not reading.expired():
                raise
        await session.flush(FLUSH_TIMEOUT_S)
        self._forget(session)
        if session.left and session.known is not None:
            await finish(self._fleet.save_departure(session.known))
        await session.flush()

    async def _read(self, session: Session, context: Context) -> None:
        try:
            while (frame := await _next(context)) is not None:
                if not self._fleet.reader.is_current(session):
                    continue  # a newer stream of the worker has taken over
                if session.known is not None:
                    self._fleet.registry.seen(session.known, time.monotonic(), time.time_ns())
                if (work := self._take(session, frame)) is not None:
                    await finish(work)
                if (known := session.known) is None:
                    continue
                self._fleet.registry.applied(known)
                if pause_s := known.pace.delay_s(frame.ByteSize(), time.monotonic()):
                    await asyncio.sleep(pause_s)
        except FleetError as error:
            self._audit(error, context, session.identity, session)
            is_told = self._fleet.refusals.may_tell(context.peer())
            if is_told:
                logger.error("session of worker %s: %s", session.hello.name, error.message)
            if error.reason in STORE_FAILURES:
                session.drain(random.uniform(*STORAGE_PAUSE_S))
            elif error.reason == errors_pb2.ERROR_REASON_TOO_MANY_CALLS:
                session.drain(error.retry_after_s or STORAGE_PAUSE_S[1])  # its hello repeats the reports
            else:
                if is_told:
                    self._fleet.events.protocol_error(error, session.hello.worker_id, session.hello.name)
                session.end(session_pb2.GOODBYE_REASON_PROTOCOL_ERROR, error)
        finally:
            session.end()

    def _take(self, session: Session, frame: ConnectRequest) -> Coroutine[Any, Any, None] | None:
        """Applies a frame. Returns the remaining work as a coroutine, or None."""
        check_values(frame)
        match frame.WhichOneof("frame"):
            case "worker_load":
                self._take_load(session, frame.worker_load)
            case "command_update":
                return self._dispatcher.take(session, frame.command_update)
            case "workload_event":
                return self._fleet.apply_workload(frame.workload_event.workload, session)
            case "output_chunk":
                session.answer_read(frame.output_chunk)
            case "plan_answer":
                session.answer_plan(frame.plan_answer)
            case "checkpoint_answer":
                session.answer_checkpoints(frame.checkpoint_answer)
            case "authorities_stored":
                if session.is_certified and session.identity is not None:
                    self._authentication.certificates.confirm(
                        session.identity, frozenset(frame.authorities_stored.serials)
                    )
            case "goodbye":
                session.left = True
                logger.info("worker %s said goodbye: %s", session.hello.name, frame.goodbye.error.message)
                session.end()
            case "hello":
                return self._take_hello(session, frame.hello)
            case None:
                logger.warning("ignored a frame of a newer worker %s", session.hello.name)
        return None

    def _take_load(self, session: Session, load: WorkerLoad) -> None:
        known = session.known
        if load.session_id not in ("", session.session_id):
            logger.warning("ignored a load of another session of worker %s", session.hello.name)
            return
        if known is None:
            return
        check_leases(self._fleet.reader, session.hello.worker_id, load.gpu_leases)
        if self._fleet.registry.apply_load(known, load):
            self._fleet.worker_news.publish(known)
        session.loads += 1
        if session.loads % HEARTBEAT_LOADS == 0:
            beat = Heartbeat(applied_load_sequence=known.load_sequence)
            interval_s = self._fleet.registry.load_interval_s
            if abs(interval_s - known.load_interval_s) > INTERVAL_CHANGE * known.load_interval_s:
                known.load_interval_s = interval_s
                beat.load_interval.CopyFrom(duration(interval_s))
                beat.silence_limit.CopyFrom(duration(SILENCE_INTERVALS * interval_s))
            session.send(ConnectResponse(heartbeat=beat))

    async def _take_hello(self, session: Session, hello: Hello) -> None:
        """Applies a later hello of the session, with a changed inventory or changed capabilities."""
        if not self._fleet.reader.is_current(session):  # a newer stream has taken over since then
            return
        ids = (session.hello.worker_id, session.hello.instance_id)
        if (hello.worker_id, hello.instance_id) != ids or session.known is None:
            raise FleetError(
                errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
                f"a second hello has other ids than {ids[0]} and {ids[1]}: open a new stream for other ids",
            )
        check_hello(hello)
        if session.identity is not None:
            _check_name(hello, session.identity)
        async with self._fleet.new_binding(hello, is_certified=session.is_certified) as binding:
            if not self._fleet.reader.is_current(session):
                return
            self._fleet.registry.check_unique(hello, time.monotonic())
            _check_own(self._fleet, hello)
            robbed = self._fleet.registry.take_gpus(hello)
            self._fleet.registry.describe(session.known, hello)
            await self._fleet.save_worker(hello, session.epoch, robbed, binding, session.address)
        if self._fleet.reader.is_current(session):
            self._fleet.worker_news.publish(session.known)


def _check_own(fleet: Fleet, hello: Hello) -> None:
    """Refuses leases and unfinished workloads in a hello that are of other workers.

    Raises:
        FleetError: PROTOCOL_VIOLATION.
    """
    claimed = {gpu.uuid for gpu in hello.gpus}
    check_leases(fleet.reader, hello.worker_id, hello.gpu_leases, claimed=claimed)
    for reported in hello.workloads:
        if (known := fleet.workloads.get(reported.workload_id)) is not None:
            check_workload_of(known, hello.worker_id)


def _check_name(hello: Hello, identity: Identity) -> None:
    """Refuses a hello whose name is not that of the worker's credential.

    Raises:
        FleetError: IDENTITY_MISMATCH.
    """
    if hello.name != identity.name:
        raise FleetError(
            errors_pb2.ERROR_REASON_IDENTITY_MISMATCH,
            f"the worker's hello has the name {hello.name}, and its certificate is of {identity}: start the "
            f"worker with --name {identity.name}, or get a certificate for the name {hello.name}",
            name=hello.name,
            identity=str(identity),
        )


def _parse(data: bytes) -> ConnectRequest | None:
    """A frame. None: the bytes are malformed."""
    try:
        return ConnectRequest.FromString(data)
    except DecodeError:
        return None


async def _next(context: Context) -> ConnectRequest | None:
    """The next frame. None: the stream has ended.

    Raises:
        FleetError: PROTOCOL_VIOLATION, the frame is malformed.
    """
    frame: object = await context.read()
    if frame is grpc.aio.EOF:
        return None
    if not isinstance(frame, ConnectRequest):
        message = "a frame can't be parsed: update the older of worker and coordinator"
        raise FleetError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, message)
    return frame


async def _read_hello(context: Context) -> Hello:
    """The first frame.

    Raises:
        FleetError: PROTOCOL_VIOLATION, the first frame is not hello. WORKER_UNAVAILABLE, the frame is late.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            frame = await _next(context)
    except TimeoutError:
        # Not a refusal, after which a worker waits for a minute. A busy coordinator may itself read a hello
        # late, for example when thousands of workers reconnect at once.
        raise FleetError(
            errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
            f"no hello came within {HELLO_TIMEOUT_S:g} s: connect again",
        ) from None
    if frame is None or not frame.HasField("hello"):
        raise FleetError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, "the first frame must be hello")
    return frame.hello


async def _send(context: Context, frame: ConnectResponse) -> bool:
    """Sends a frame. False: the worker has disconnected, or the server has stopped."""
    try:
        await context.write(frame)
    except grpc.aio.BaseError:
        return False
    return True
