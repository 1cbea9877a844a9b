"""The stream of a worker: hello, welcome, then frames both ways until one side leaves."""

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

from leasehold_coordinator import __version__
from leasehold_coordinator.api.rpc_errors import abort
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.core.hello_rules import check_hello, check_values
from leasehold_coordinator.crash_points import crash_point
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import SESSION_LIMIT, CallLimits
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.fleet.session import Session
from leasehold_coordinator.shielding import finish
from leasehold_coordinator.timestamps import duration

logger = logging.getLogger(__name__)

PROTOCOL_VERSION: Final = ProtocolVersion(major=1, minor=4)
TRANSIENT: Final = (
    errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
    errors_pb2.ERROR_REASON_WORKER_CONNECTED,
    errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
    errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
)
"""Reasons that may be over soon: a full disk, an older stream that has not ended yet, a late hello."""

HELLO_TIMEOUT_S: Final = 10.0
"""How long a stream may take to say hello: as long as a worker waits for its welcome."""

HELLO_LIMIT: Final = 4_096
"""Streams at once that have not said hello yet."""

FLUSH_TIMEOUT_S: Final = 2.0
SILENCE_INTERVALS: Final = 12
"""Load intervals without any frame after which a worker gives the coordinator up."""

HEARTBEAT_LOADS: Final = 3
"""Loads after which a worker hears of us. A timer for each of thousands of streams would cost more."""

INTERVAL_CHANGE: Final = 0.2
"""By how much of it the load interval must have changed before a worker is told."""

STORAGE_PAUSE_S: Final = (2.0, 6.0)
"""How long a worker stays away, at least and at most, whose reports can't be stored."""

TAKEOVER_WAIT_S: Final = 2.0
"""How long a new instance of a worker waits for the end of the stream of the one before, which was killed."""

Context = grpc.aio.ServicerContext[ConnectRequest, ConnectResponse]


@final
class SessionService(SessionServiceServicer):
    """Serves the workers' streams."""

    def __init__(self, fleet: Fleet, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By worker, while one is let in."""
        self._streams, self._hellos = CallLimits(SESSION_LIMIT), CallLimits(HELLO_LIMIT)

    async def Connect(  # type: ignore[override]  # a coroutine: it reads and writes by context
        self, request_iterator: object, context: Context
    ) -> None:
        try:
            # Until the call is over in gRPC, which lets go of none whose peer does not read what was sent.
            leave = self._streams.enter(context.peer())
            context.add_done_callback(lambda _: leave())  # type: ignore[arg-type]  # any callable will do
            with self._hellos.entered(context.peer()):
                session = Session(await _read_hello(context))  # no variable keeps the whole hello in memory
            self._check(session.hello)
        except FleetError as error:
            is_told = self._fleet.refusals.may_tell(context.peer())
            if is_told:
                logger.warning("refused a worker: %s", error.message)
            if error.reason in TRANSIENT:
                await abort(context, error)
            if is_told:
                self._fleet.events.refused(error)
            refusal = Goodbye(reason=session_pb2.GOODBYE_REASON_REFUSED, error=error.to_proto())
            await _send(context, ConnectResponse(goodbye=refusal))
            return
        try:
            await finish(self._welcome(session))
            await self._converse(session, context)
        except FleetError as error:
            is_told = self._fleet.refusals.may_tell(context.peer())
            if is_told:
                logger.error("worker %s can't be let in: %s", session.hello.name, error.message)
            if error.reason in TRANSIENT:
                await abort(context, error)  # no refusal: the worker tries again, and again less often
            if is_told:
                self._fleet.events.refused(error, session.hello.worker_id, session.hello.name)
            refusal = Goodbye(reason=session_pb2.GOODBYE_REASON_REFUSED, error=error.to_proto())
            await _send(context, ConnectResponse(goodbye=refusal))
        finally:
            self._forget(session)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves this on a server.

        Not by the generated function: with it a malformed frame would end the stream without a word.
        """
        handler = grpc.stream_stream_rpc_method_handler(
            self.Connect,
            request_deserializer=_parse,
            response_serializer=ConnectResponse.SerializeToString,
        )
        name = session_pb2.DESCRIPTOR.services_by_name["SessionService"].full_name
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Connect": handler}),))

    def _check(self, hello: Hello) -> None:
        theirs = hello.protocol_version
        if theirs.major != PROTOCOL_VERSION.major:
            ours_text, theirs_text = (f"{v.major}.{v.minor}" for v in (PROTOCOL_VERSION, theirs))
            raise FleetError(
                errors_pb2.ERROR_REASON_PROTOCOL_VERSION,
                f"the worker speaks protocol {theirs_text} and the coordinator {ours_text}: update the older",
                worker=theirs_text,
                coordinator=ours_text,
            )
        check_values(hello)
        check_hello(hello)

    async def _welcome(self, session: Session) -> None:
        """Lets the worker in, one stream of it after the other.

        What a hello says is true of its own stream: where that ends meanwhile, nothing more is concluded.

        Raises:
            FleetError: DUPLICATE_WORKER_ID; or STORAGE_UNAVAILABLE.
        """
        await self._wait_for_older(session.hello)
        turn = self._turns.setdefault(session.hello.worker_id, asyncio.Lock())
        async with turn:
            if not session.ended.done():
                await self._let_in(session)

    async def _wait_for_older(self, hello: Hello) -> None:
        """Gives the stream of an instance that was killed some time to end."""
        older = self._fleet.sessions.get(hello.worker_id)
        if older is not None and self._fleet.registry.is_taken(hello, time.monotonic()):
            await asyncio.wait({older.ended}, timeout=TAKEOVER_WAIT_S)

    async def _let_in(self, session: Session) -> None:
        """The epoch is stored first, and an older stream of the worker is superseded."""
        fleet, hello = self._fleet, session.hello
        fleet.registry.check_newcomer(hello, time.monotonic())
        crash_point("hello-received")
        session.epoch = fleet.registry.next_epoch(hello)
        session.is_restored = fleet.registry.is_restored(hello)
        older = fleet.sessions.get(hello.worker_id)
        robbed = fleet.registry.take_gpus(hello)
        session.known = fleet.registry.welcome(
            hello, session.epoch, session.session_id, time.monotonic(), time.time_ns()
        )
        # Queued before anything else can be; it is sent once all below is stored.
        session.send(ConnectResponse(welcome=self._welcome_frame(session)))
        fleet.sessions[hello.worker_id] = session
        session.earlier = frozenset(fleet.ledger.stored_of_worker(hello.worker_id))
        if older is not None:
            older.end(session_pb2.GOODBYE_REASON_SUPERSEDED)
        await fleet.save_worker(hello, session.epoch, robbed)
        crash_point("epoch-stored")
        logger.info("worker %s (%s) connected, epoch %d", hello.name, hello.worker_id, session.epoch)
        await self._dispatcher.reconcile_workloads(session, hello.workloads)
        await self._dispatcher.welcome(session)
        session.hello = session.known.hello  # the rest of it is kept elsewhere by now
        for known in robbed:
            fleet.worker_news.publish(known)
        if fleet.reader.is_current(session):
            fleet.worker_news.publish(session.known)
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
        )

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
        """Reads frames until the session ends, and then sends what is queued.

        A peer that does not read keeps its stream, and the worker has no session meanwhile: gRPC can neither
        cancel a write nor end a call before its last write.
        """
        try:
            async with asyncio.timeout(None) as reading:
                session.open(partial(_send, context), partial(reading.reschedule, 0.0))
                await self._read(session, context)
        except TimeoutError:  # the end of the session, if it is the timeout above
            if not reading.expired():
                raise
        await session.flush(FLUSH_TIMEOUT_S)
        self._forget(session)
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
        except FleetError as error:
            is_told = self._fleet.refusals.may_tell(context.peer())
            if is_told:
                logger.error("session of worker %s: %s", session.hello.name, error.message)
            if error.reason == errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE:
                session.drain(random.uniform(*STORAGE_PAUSE_S))
            else:
                if is_told:
                    self._fleet.events.protocol_error(error, session.hello.worker_id, session.hello.name)
                session.end(session_pb2.GOODBYE_REASON_PROTOCOL_ERROR, error)
        finally:
            session.end()

    def _take(self, session: Session, frame: ConnectRequest) -> Coroutine[Any, Any, None] | None:
        """Takes a frame in. Returns what is left to do, if that takes a while."""
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
        """Takes in what has changed of a worker's inventory or capabilities, under the same session."""
        if not self._fleet.reader.is_current(
            session
        ):  # a newer stream has taken over since the frame was read
            return
        ids = (session.hello.worker_id, session.hello.instance_id)
        if (hello.worker_id, hello.instance_id) != ids or session.known is None:
            raise FleetError(
                errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
                f"hello came again with other ids than {ids[0]} and {ids[1]}: connect anew for that",
            )
        check_hello(hello)
        self._fleet.registry.check_unique(hello, time.monotonic())
        robbed = self._fleet.registry.take_gpus(hello)
        self._fleet.registry.describe(session.known, hello)
        await self._fleet.save_worker(hello, session.epoch, robbed)
        if self._fleet.reader.is_current(session):
            self._fleet.worker_news.publish(session.known)


def _parse(data: bytes) -> ConnectRequest | None:
    """A frame; None for bytes that are none."""
    try:
        return ConnectRequest.FromString(data)
    except DecodeError:
        return None


async def _next(context: Context) -> ConnectRequest | None:
    """The next frame; None after the last.

    Raises:
        FleetError: PROTOCOL_VIOLATION, what came is no frame.
    """
    frame: object = await context.read()
    if frame is grpc.aio.EOF:
        return None
    if not isinstance(frame, ConnectRequest):
        raise FleetError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, "what came is no frame of this protocol")
    return frame


async def _read_hello(context: Context) -> Hello:
    """The first frame.

    Raises:
        FleetError: PROTOCOL_VIOLATION, the first frame is not hello; or WORKER_UNAVAILABLE, it is late.
    """
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            frame = await _next(context)
    except TimeoutError:
        # No refusal, after which a worker stays away for a minute: of thousands that come back at once, some
        # hellos are read late because the coordinator is busy.
        raise FleetError(
            errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE,
            f"no hello came within {HELLO_TIMEOUT_S:g} s: connect again",
        ) from None
    if frame is None or not frame.HasField("hello"):
        raise FleetError(errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION, "the first frame must be hello")
    return frame.hello


async def _send(context: Context, frame: ConnectResponse) -> bool:
    """Sends a frame. False: the worker is gone, which gRPC reports by an error of its own."""
    try:
        await context.write(frame)
    except (grpc.aio.InternalError, grpc.aio.UsageError):
        return False
    return True
