"""The stream to the coordinator: connect, say hello, pump frames both ways, connect again.

gRPC's synchronous stub is bridged to trio: one thread reads responses and hands them over through the trio
token, and gRPC's own thread takes frames from the outbox. A worker that loses its coordinator fails static:
workloads stay as they are.
"""

import logging
import random
from collections.abc import Callable, Iterator
from typing import Final, Protocol, cast, final

import grpc
import trio
from leasehold.v1 import worker_session_pb2
from leasehold.v1.worker_session_pb2 import (
    ConnectRequest,
    ConnectResponse,
    Goodbye,
    GoodbyeReason,
    PlanQuery,
    ReadOutput,
    Welcome,
)
from leasehold.v1.worker_session_pb2_grpc import WorkerSessionServiceStub

from leasehold_worker.channel import open_channel
from leasehold_worker.commands import Commands
from leasehold_worker.crash_points import crash_point
from leasehold_worker.journal import Journal
from leasehold_worker.outbox import Outbox, OutboxFullError
from leasehold_worker.output import read_output
from leasehold_worker.planning import Planning
from leasehold_worker.pool import GpuPool
from leasehold_worker.reports import PROTOCOL_VERSION, Reporter
from leasehold_worker.state_directory import StateDirectory
from leasehold_worker.workloads import Workloads

logger = logging.getLogger(__name__)

INBOX_LIMIT: Final = 256
WELCOME_TIMEOUT_S: Final = 10.0
GOODBYE_TIMEOUT_S: Final = 2.0
JOURNAL_TIMEOUT_S: Final = 5.0
"""How long hello waits until all that it tells is on disk. A disk that refuses must not cut us off."""

EPOCH_LIMIT: Final = 2**62
"""More sessions than there can have been, and a number that fits into the journal."""

COALESCE_S: Final = 0.05
"""Lease changes that come together are told by one load, within 100 ms."""

READS_AT_ONCE: Final = 16
PLANS_AT_ONCE: Final = 1

BACKOFF_MIN_S: Final = 0.5
BACKOFF_MAX_S: Final = 15.0
REFUSED_BACKOFF_S: Final = 60.0
"""After an answer that trying again does not change."""

HEALTHY_AFTER_S: Final = 60.0
"""A stream that lived this long resets the back-off."""

_FINAL_CODES: Final = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
}
_FINAL_GOODBYES: Final = {
    worker_session_pb2.GOODBYE_REASON_SUPERSEDED,
    worker_session_pb2.GOODBYE_REASON_REFUSED,
    worker_session_pb2.GOODBYE_REASON_PROTOCOL_ERROR,
}


class _Call(Protocol):
    """What the bridge uses of a gRPC call."""

    def __iter__(self) -> Iterator[ConnectResponse]: ...
    def cancel(self) -> bool: ...


class _SessionEnd(Exception):  # noqa: N818 - it is how every session ends, not always an error
    """The session is over. ``retry_after_s`` is the time before the next, None for the usual back-off."""

    def __init__(self, why: str, retry_after_s: float | None = None) -> None:
        super().__init__(why)
        self.why = why
        self.retry_after_s = retry_after_s


@final
class Link:
    """The worker's end of the stream."""

    def __init__(
        self,
        coordinator: str,
        state_directory: StateDirectory,
        reporter: Reporter,
        commands: Commands,
        workloads: Workloads,
        pool: GpuPool,
        planning: Planning,
        journal: Journal,
    ) -> None:
        self._coordinator = coordinator
        self._state_directory = state_directory
        self._reporter = reporter
        self._commands = commands
        self._workloads = workloads
        self._pool = pool
        self._planning = planning
        self._journal = journal
        self._outbox: Outbox | None = None
        self._session_over = trio.Event()
        self._leaving = False
        self._epoch = state_directory.last_epoch()

    def send(self, frame: ConnectRequest) -> None:
        """Sends a frame if there is a session. Without one it is dropped: the next hello tells all."""
        if self._outbox is None:
            return
        try:
            self._outbox.put(frame)
        except OutboxFullError as error:
            logger.error("%s; connecting again", error)
            self._outbox.close()
            self._outbox = None

    async def leave(self, reason: GoodbyeReason.ValueType) -> None:
        """Says goodbye, and waits 2 s at most for the coordinator to end the stream, which proves receipt."""
        self._leaving = True
        outbox = self._outbox
        if outbox is None:
            return
        self.send(ConnectRequest(goodbye=Goodbye(reason=reason)))
        outbox.close()
        with trio.move_on_after(GOODBYE_TIMEOUT_S):
            await self._session_over.wait()

    async def run(self) -> None:
        """Holds a session, and another after it, until cancelled or left."""
        backoff_s = BACKOFF_MIN_S
        with open_channel(self._coordinator) as channel:
            stub = WorkerSessionServiceStub(channel)
            while True:
                began = trio.current_time()
                end = await self._session(stub)
                if self._leaving:
                    return
                if trio.current_time() - began > HEALTHY_AFTER_S:
                    backoff_s = BACKOFF_MIN_S
                wait_s = random.uniform(0, backoff_s) if end.retry_after_s is None else end.retry_after_s
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
                logger.warning("session ended: %s; connecting again in %.1f s", end.why, wait_s)
                await trio.sleep(wait_s)

    async def _session(self, stub: WorkerSessionServiceStub) -> _SessionEnd:
        """Holds one session to its end."""
        readings = await self._reporter.read_gpus()
        outbox = Outbox()
        with trio.move_on_after(JOURNAL_TIMEOUT_S):
            await self._journal.wait_settled()
        # No await from here to the put: nothing may come between the snapshot in hello and what follows.
        hello = self._reporter.hello(readings, self._epoch)
        outbox.put(ConnectRequest(hello=hello))
        self._outbox = outbox
        self._session_over = trio.Event()
        call = stub.Connect(outbox)
        try:
            async with trio.open_nursery() as nursery:
                try:
                    frames = _start_reader(nursery, call)
                    await self._converse(frames, outbox, nursery)
                finally:
                    outbox.close()
                    call.cancel()
                    nursery.cancel_scope.cancel()
        except* _SessionEnd as group:
            first = group.exceptions[0]
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            end = first
        finally:
            if self._outbox is outbox:
                self._outbox = None
            self._session_over.set()
        return end

    async def _converse(
        self,
        frames: trio.MemoryReceiveChannel[ConnectResponse | _SessionEnd],
        outbox: Outbox,
        nursery: trio.Nursery,
    ) -> None:
        welcome = await self._be_welcomed(frames)
        session_id = welcome.session_id
        logger.info("connected to %s, session %s, epoch %d", self._coordinator, session_id, welcome.epoch)
        for update in self._commands.unacknowledged:
            self.send(ConnectRequest(command_update=update))
        nursery.start_soon(self._report_loads, outbox, welcome)
        reads = trio.CapacityLimiter(READS_AT_ONCE)
        plans = trio.CapacityLimiter(PLANS_AT_ONCE)
        silence_limit_s = welcome.silence_limit.ToTimedelta().total_seconds()
        while True:
            frame = await _receive(frames, silence_limit_s)
            match frame.WhichOneof("frame"):
                case "command":
                    self._commands.receive(frame.command, welcome.epoch)
                case "command_ack":
                    self._commands.acknowledge(frame.command_ack.command_id)
                case "read_output":
                    nursery.start_soon(self._answer_read, frame.read_output, reads)
                case "plan_query":
                    nursery.start_soon(self._answer_plan, frame.plan_query, plans)
                case "goodbye":
                    raise _farewell(frame.goodbye)
                case "drain":
                    wait_s = frame.drain.reconnect_after.ToTimedelta().total_seconds()
                    raise _SessionEnd("the coordinator asked to connect again later", wait_s)
                case "welcome":
                    raise _SessionEnd("the coordinator said welcome twice", REFUSED_BACKOFF_S)
                case "heartbeat":
                    pass
                case None:
                    logger.warning("ignored a frame of a newer coordinator")

    async def _be_welcomed(self, frames: trio.MemoryReceiveChannel[ConnectResponse | _SessionEnd]) -> Welcome:
        frame = await _receive(frames, WELCOME_TIMEOUT_S)
        if frame.HasField("goodbye"):
            raise _farewell(frame.goodbye)
        if not frame.HasField("welcome"):
            raise _SessionEnd("the coordinator's first frame is not welcome", REFUSED_BACKOFF_S)
        welcome = frame.welcome
        if welcome.protocol_version.major != PROTOCOL_VERSION.major:
            raise _SessionEnd(
                f"the coordinator speaks protocol {welcome.protocol_version.major} and this worker "
                f"{PROTOCOL_VERSION.major}: update the older one",
                REFUSED_BACKOFF_S,
            )
        if welcome.epoch <= self._epoch:
            raise _SessionEnd(
                f"the coordinator's epoch {welcome.epoch} is not above {self._epoch}: it is deposed"
            )
        if welcome.epoch >= EPOCH_LIMIT:
            raise _SessionEnd(f"the epoch {welcome.epoch} was never given out", REFUSED_BACKOFF_S)
        try:
            await trio.to_thread.run_sync(self._state_directory.save_epoch, welcome.epoch)
        except OSError as error:
            raise _SessionEnd(f"the epoch can't be kept: {error.strerror}: look at the disk") from error
        self._epoch = welcome.epoch
        crash_point("epoch-saved")
        return welcome

    async def _report_loads(self, outbox: Outbox, welcome: Welcome) -> None:
        """Tells the load within every interval, and soon after each change of a lease."""
        interval_s = welcome.load_interval.ToTimedelta().total_seconds()
        next_s = random.uniform(0, interval_s)
        while True:
            with trio.move_on_after(next_s):
                await self._pool.wait_changed()
                await trio.sleep(COALESCE_S)
            readings = await self._reporter.read_gpus()
            outbox.put_load(ConnectRequest(worker_load=self._reporter.load(readings, welcome.session_id)))
            next_s = interval_s * random.uniform(0.9, 1.1)

    async def _answer_read(self, request: ReadOutput, reads: trio.CapacityLimiter) -> None:
        async with reads:
            chunk = await read_output(self._workloads, request)
        self.send(ConnectRequest(output_chunk=chunk))

    async def _answer_plan(self, query: PlanQuery, plans: trio.CapacityLimiter) -> None:
        async with plans:
            answer = await self._planning.answer(query)
        self.send(ConnectRequest(plan_answer=answer))


async def _receive(
    frames: trio.MemoryReceiveChannel[ConnectResponse | _SessionEnd], timeout_s: float
) -> ConnectResponse:
    """The next frame.

    Raises:
        _SessionEnd: The stream ended, or nothing came in time.
    """
    with trio.move_on_after(timeout_s):
        frame = await frames.receive()
        if isinstance(frame, _SessionEnd):
            raise frame
        return frame
    raise _SessionEnd(f"nothing came from the coordinator for {timeout_s:g} s")


def _start_reader(
    nursery: trio.Nursery, call: _Call
) -> trio.MemoryReceiveChannel[ConnectResponse | _SessionEnd]:
    """Starts the thread that reads responses. It ends when the call does, so the call must be cancelled."""
    # One place more than frames may take: the end always fits.
    send, receive = trio.open_memory_channel[ConnectResponse | _SessionEnd](INBOX_LIMIT + 1)
    token = trio.lowlevel.current_trio_token()

    def deliver(item: ConnectResponse | _SessionEnd) -> None:
        waiting = send.statistics().current_buffer_used
        if isinstance(item, _SessionEnd) or waiting < INBOX_LIMIT:
            send.send_nowait(item)
        else:
            call.cancel()

    def read() -> None:
        token.run_sync_soon(
            deliver, _read_to_the_end(call, lambda frame: token.run_sync_soon(deliver, frame))
        )

    async def read_in_thread() -> None:
        await trio.to_thread.run_sync(read)

    nursery.start_soon(read_in_thread)
    return receive


def _read_to_the_end(call: _Call, deliver: Callable[[ConnectResponse], None]) -> _SessionEnd:
    try:
        for frame in call:
            deliver(frame)
    except grpc.RpcError as error:
        status = cast("grpc.Call", error)  # every error of a stub is its call too
        why = f"{status.code().name}: {status.details()}"
        return _SessionEnd(why, REFUSED_BACKOFF_S if status.code() in _FINAL_CODES else None)
    return _SessionEnd("the coordinator closed the stream without a goodbye")


def _farewell(goodbye: Goodbye) -> _SessionEnd:
    reason = GoodbyeReason.Name(goodbye.reason).removeprefix("GOODBYE_REASON_")
    why = f"the coordinator said goodbye ({reason})"
    if goodbye.HasField("error"):
        why += f": {goodbye.error.message}"
    return _SessionEnd(why, REFUSED_BACKOFF_S if goodbye.reason in _FINAL_GOODBYES else None)
