"""The stream to the coordinator: connect, send hello, pass frames both ways, reconnect.

A worker without its coordinator changes nothing: workloads stay as they are.
"""

import logging
import random
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Final, cast, final

import grpc
import trio
from leasehold.v1 import errors_pb2
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import (
    Authorities,
    AuthoritiesStored,
    ConnectRequest,
    ConnectResponse,
    Goodbye,
    GoodbyeReason,
    Heartbeat,
    Welcome,
)

from leasehold_worker import metrics
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import Journal
from leasehold_worker.commands.ledger import LOCAL_PREFIX, is_local
from leasehold_worker.crash_points import crash_point
from leasehold_worker.errors import OperationError, StartError
from leasehold_worker.files.state_directory import StateDirectory
from leasehold_worker.gpus.inventory import GpuReading
from leasehold_worker.host.clock_offset import ClockOffset
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.programs.error_text import error_text
from leasehold_worker.programs.secret_variables import SecretVariables
from leasehold_worker.session.channel import (
    CERTIFICATE_FILES,
    INSECURE_SCHEME,
    open_channel,
    open_enrolled_channel,
)
from leasehold_worker.session.client_keys import require_valid
from leasehold_worker.session.credential_files import Look, look, wait_for_change
from leasehold_worker.session.enrolment import keep_authorities
from leasehold_worker.session.frame_sink import FrameSink
from leasehold_worker.session.grpc_bridge import (
    REFUSED_BACKOFF_S,
    Incoming,
    SessionEndError,
    open_stream,
    violation,
)
from leasehold_worker.session.outbox import FRAME_LIMIT, Outbox
from leasehold_worker.session.own_certificate import certificate_validity_s
from leasehold_worker.session.queries import Queries
from leasehold_worker.session.reporter import PROTOCOL_VERSION, Reporter
from leasehold_worker.session.tls_failures import explain, explain_closed
from leasehold_worker.threads import run_in_thread
from leasehold_worker.timestamps import epoch_seconds, seconds

logger = logging.getLogger(__name__)

WELCOME_TIMEOUT_S: Final = 20.0
"""Time for the connection and the welcome."""

GOODBYE_TIMEOUT_S: Final = 2.0
JOURNAL_TIMEOUT_S: Final = 5.0
"""Time that hello waits until its content is on disk. A disk that refuses must not cut the worker off."""

EPOCH_LIMIT: Final = 2**62
"""More sessions than are possible, and a number that fits into the journal."""

COALESCE_S: Final = 0.05
"""Lease changes within 100 ms share one load."""

COMMAND_ID_LIMIT: Final = 128
"""Characters of a command's id, which the worker stores and logs."""

SESSION_ID_LIMIT: Final = 64
"""Characters of the session's id in the log. The coordinator may send any id."""

POLL_INTERVAL_S: Final = 0.02
LOAD_INTERVALS_S: Final = (0.01, 3600.0)
SILENCE_LIMIT_S: Final = 86_400.0
"""Longest silence that a welcome may permit. A longer one would pass for a lost peer."""

RECONNECT_LIMIT_S: Final = 300.0
"""Longest time that a drain may keep a worker away."""

BACKOFF_MIN_S: Final = 0.5
BACKOFF_MAX_S: Final = 8.0
HEALTHY_AFTER_S: Final = 60.0
"""A stream that lived this long resets the back-off."""

_FINAL_GOODBYES: Final = {
    session_pb2.GOODBYE_REASON_SUPERSEDED,
    session_pb2.GOODBYE_REASON_REFUSED,
    session_pb2.GOODBYE_REASON_PROTOCOL_ERROR,
}


@final
class CoordinatorSession:
    """The worker's end of the stream."""

    def __init__(
        self,
        coordinator: str,
        credentials: Path,
        secrets: SecretVariables,
        frames: FrameSink,
        state_directory: StateDirectory,
        reporter: Reporter,
        commands: Commands,
        pool: GpuPool,
        queries: Queries,
        journal: Journal,
        clock: ClockOffset,
    ) -> None:
        self._coordinator = coordinator
        self._credentials = credentials
        self._files: Look = []
        """The files of the certificate that the present session uses."""
        self._secrets = secrets
        self._state_directory = state_directory
        self._reporter = reporter
        self._commands = commands
        self._pool = pool
        self._queries = queries
        self._journal = journal
        self._clock = clock
        self._frames = frames
        self._session_over = trio.Event()
        self._leaving = False
        self._told_revision = -1
        """The revision of the slots in the last load."""
        self.is_connected = False
        """Whether the coordinator has welcomed the worker, and the session has not ended."""
        self._heard_s = 0.0
        """When the session's last frame came."""
        self.certificate_validity_s: tuple[float, float] | None = None
        """The times between which the certificate in the files of ``--credentials`` is valid, in seconds of
        the Unix epoch. None: unknown, or not in use."""
        self._epoch = state_directory.last_epoch()
        self._described = reporter.description()
        self._ignored = 0
        self._answer_turn = trio.Lock()
        self._newest_authorities: Authorities | None = None
        """The last authorities that came, while earlier ones are being stored."""
        self._stores_authorities = False
        self._authorities_limiter = trio.CapacityLimiter(1)
        """Held by the thread that stores authorities, forever if the disk hangs."""
        self._load_interval_s = self._silence_limit_s = 0.0
        self._next_load = trio.CancelScope()

    @property
    def silence_s(self) -> float | None:
        """Time since the coordinator's last frame. None: there is no session."""
        return trio.current_time() - self._heard_s if self.is_connected else None

    @property
    def frames_waiting(self) -> int | None:
        """Number of frames that wait for the coordinator to read. None: there is no session."""
        outbox = self._frames.outbox
        return outbox.waiting if outbox is not None else None

    async def leave(self, reason: GoodbyeReason.ValueType) -> None:
        """Sends goodbye, and waits 2 s at most for the coordinator to end the stream, as confirmation."""
        self._leaving = True
        outbox = self._frames.outbox
        if outbox is None:
            return
        if self._told_revision != self._pool.slots.snapshot().revision:
            # A workload was parked or stopped just now. A load of its own would come after the goodbye.
            self._frames.send(ConnectRequest(worker_load=self._reporter.last_load()))
        self._frames.send(ConnectRequest(goodbye=Goodbye(reason=reason)))
        outbox.close()
        with trio.move_on_after(GOODBYE_TIMEOUT_S):
            await self._session_over.wait()

    async def run(self) -> None:
        """Holds one session after another, until cancelled or left."""
        if self._coordinator.startswith(INSECURE_SCHEME):
            logger.warning(_INSECURE, self._coordinator)
        backoff_s = BACKOFF_MIN_S
        while True:
            began = trio.current_time()
            try:
                end = await self._connect()
            except Exception:  # a failed session must not end the worker
                logger.exception("a session failed because of a defect")
                end = SessionEndError("a defect of Leasehold")
            if self._leaving:
                return
            if trio.current_time() - began > HEALTHY_AFTER_S:
                backoff_s = BACKOFF_MIN_S
            wait_s = random.uniform(0, backoff_s) if end.retry_after_s is None else end.retry_after_s
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            logger.warning("session ended: %s; connecting again in %.1f s", end.why, wait_s)
            await trio.sleep(wait_s)

    async def _connect(self) -> SessionEndError:
        """Holds one session on a channel of its own, with the present credentials."""
        try:
            channel = await run_in_thread(self._open_channel, abandon_on_cancel=True)
        except BlockingIOError as error:  # no thread can be started
            return SessionEndError(str(error))
        except OSError as error:
            return SessionEndError(
                f"the credentials for {self._coordinator} can't be read: {error_text(error)}; join with a "
                "token of `leasehold token create --worker NAME`, start the coordinator as this user, or "
                "name the directory of its ca.pem and worker.token with --credentials"
            )
        except StartError as error:
            return SessionEndError(str(error), REFUSED_BACKOFF_S)
        with channel:
            try:
                end = await self._session(channel)
            except BlockingIOError as error:  # no thread can be started
                return SessionEndError(str(error))
        with suppress(OSError):  # no thread can be started
            cause = await run_in_thread(self._explain, end.why, abandon_on_cancel=True)
            end.why = cause or end.why
        return end

    def _explain(self, why: str) -> str | None:
        """The cause of an ended session in TLS, with its remedy. Blocks."""
        certificate = self._credentials / CERTIFICATE_FILES[0] if self._files else None
        return explain(why, self._coordinator) or explain_closed(why, self._coordinator, certificate)

    def _open_channel(self) -> grpc.Channel:
        """A channel with the worker's certificate, or else with the files of ``--credentials``.

        Raises:
            OSError: A file can't be read, or does not hold what it should.
            StartError: The certificate is damaged or has expired.
        """
        enrolment = self._state_directory.enrolment()
        if enrolment is None or not enrolment.certificate or self._coordinator.startswith(INSECURE_SCHEME):
            self._files = look(self._credentials)  # before they are read, so that no change is missed
            self.certificate_validity_s = certificate_validity_s(self._credentials / CERTIFICATE_FILES[0])
            return open_channel(self._coordinator, self._credentials)
        self._files, self.certificate_validity_s = [], None
        require_valid(enrolment)
        return open_enrolled_channel(self._coordinator, enrolment)

    async def _session(self, channel: grpc.Channel) -> SessionEndError:
        """Holds one session until its end."""
        readings = await self._reporter.read_gpus()
        with trio.move_on_after(JOURNAL_TIMEOUT_S):
            await self._journal.wait_settled()
        # No await between the two: nothing may come between the snapshot in hello and what follows.
        outbox = self._frames.open()
        self._say_hello(readings)
        self._session_over = trio.Event()
        try:
            async with open_stream(channel, outbox) as frames:
                end = await self._hold(frames, outbox)
                if end.reason is not None:
                    error = end.error.to_proto() if end.error else None
                    self._frames.send(ConnectRequest(goodbye=Goodbye(reason=end.reason, error=error)))
                    outbox.close()
                    with trio.move_on_after(GOODBYE_TIMEOUT_S):
                        await _wait_end(frames)
        finally:
            self.is_connected = False
            self._frames.close()
            self._session_over.set()
        return end

    def _say_hello(self, readings: Mapping[str, GpuReading]) -> None:
        hello = self._reporter.hello(readings, self._epoch)
        self._described = self._reporter.description()
        self._frames.send(ConnectRequest(hello=hello))

    async def _hold(self, frames: trio.MemoryReceiveChannel[Incoming], outbox: Outbox) -> SessionEndError:
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._end_when_full)
                await self._converse(frames, outbox, nursery)
        except* SessionEndError as group:
            first: BaseException = group
            while isinstance(first, BaseExceptionGroup):
                first = first.exceptions[0]
            end = cast("SessionEndError", first)
        return end

    async def _end_when_full(self) -> None:
        await self._frames.wait_overflow()
        raise SessionEndError(f"{FRAME_LIMIT} frames wait: the coordinator does not read")

    async def _end_when_files_change(self) -> None:
        await wait_for_change(self._credentials, self._files)
        raise SessionEndError("the files of the certificate have changed", 0.0)

    async def _converse(
        self,
        frames: trio.MemoryReceiveChannel[Incoming],
        outbox: Outbox,
        nursery: trio.Nursery,
    ) -> None:
        welcome = await self._be_welcomed(frames)
        session_id = welcome.session_id
        self.is_connected = True
        metrics.SESSIONS.inc()
        self._heard_s = trio.current_time()
        logger.info("connected to %s, session %s, epoch %d", self._coordinator, session_id, welcome.epoch)
        nursery.start_soon(self._tell_again, outbox)
        nursery.start_soon(self._end_when_files_change)
        nursery.start_soon(self._report_loads, outbox, welcome)
        while True:
            frame = await _receive(frames, self._silence_limit_s)
            self._heard_s = trio.current_time()
            try:
                self._take(frame, welcome, outbox, nursery)
            except SessionEndError:
                raise
            except Exception:
                logger.exception("a %s failed because of a defect, and is skipped", frame.WhichOneof("frame"))

    def _take(self, frame: ConnectResponse, welcome: Welcome, outbox: Outbox, nursery: trio.Nursery) -> None:
        match frame.WhichOneof("frame"):
            case "command":
                _check_command_id(frame.command.command.command_id)
                self._secrets.seal(frame.command.command)  # before anything of the worker keeps it
                self._commands.receive(frame.command, welcome.epoch, welcome.session_id[:SESSION_ID_LIMIT])
            case "command_ack":
                _check_command_id(frame.command_ack.command_id)
                self._commands.acknowledge(frame.command_ack.command_id)
            case "read_output" | "plan_query" | "checkpoint_query":
                self._ask(frame, outbox, nursery)
            case "goodbye":
                raise _farewell(frame.goodbye)
            case "drain":
                wait_s = min(max(0.0, seconds(frame.drain.reconnect_after)), RECONNECT_LIMIT_S)
                raise SessionEndError("the coordinator asked to connect again later", wait_s)
            case "welcome":
                raise violation("welcome came twice: say it once per stream")
            case "authorities":
                nursery.start_soon(self._keep_authorities, frame.authorities, outbox)
            case "heartbeat":
                if frame.heartbeat.HasField("load_interval"):
                    self._take_intervals(frame.heartbeat)
                    within_s = trio.current_time() + self._load_interval_s
                    self._next_load.deadline = min(self._next_load.deadline, within_s)
            case None:
                self._ignored += 1
                logger.warning("ignored a frame of a newer coordinator, the %dth", self._ignored)

    async def _keep_authorities(self, authorities: Authorities, outbox: Outbox) -> None:
        """Stores the certificates by which the coordinator is verified: one frame, then the newest."""
        self._newest_authorities = authorities
        if self._stores_authorities:
            return
        self._stores_authorities = True
        try:
            while (newest := self._newest_authorities) is not None:
                self._newest_authorities = None
                await self._store_authorities(newest, outbox)
        finally:
            self._stores_authorities, self._newest_authorities = False, None

    async def _store_authorities(self, authorities: Authorities, outbox: Outbox) -> None:
        """Stores certificates, and says so."""
        keep = partial(keep_authorities, self._state_directory, authorities.certificates)
        try:
            serials = await run_in_thread(keep, abandon_on_cancel=True, limiter=self._authorities_limiter)
        except (OSError, StartError, ValueError) as error:
            logger.error("the coordinator's authorities can't be stored: %s", error)
            return
        if serials:
            outbox.put_answer(ConnectRequest(authorities_stored=AuthoritiesStored(serials=serials)))

    async def _be_welcomed(self, frames: trio.MemoryReceiveChannel[Incoming]) -> Welcome:
        asked_s = time.time()
        frame = await _receive(frames, WELCOME_TIMEOUT_S)
        answered_s = time.time()
        if frame.HasField("goodbye"):
            raise _farewell(frame.goodbye)
        if not frame.HasField("welcome"):
            raise violation("the first frame must be welcome")
        welcome = frame.welcome
        self._check(welcome)
        told_s = epoch_seconds(welcome.time) if welcome.HasField("time") else None
        self._clock.measure(asked_s, told_s, answered_s)
        await self._save_epoch(welcome.epoch)
        self._epoch = welcome.epoch
        crash_point("epoch-saved")
        return welcome

    async def _save_epoch(self, epoch: int) -> None:
        save = partial(self._state_directory.save_epoch, epoch)
        try:
            with trio.move_on_after(JOURNAL_TIMEOUT_S) as scope:
                await run_in_thread(save, abandon_on_cancel=True)
        except (OSError, StartError) as error:
            raise SessionEndError(f"the epoch can't be stored: {error}") from error
        if scope.cancelled_caught:
            raise SessionEndError(
                f"the epoch was not stored within {JOURNAL_TIMEOUT_S:g} s: check the disk of "
                "the state directory"
            )

    def _check(self, welcome: Welcome) -> None:
        """Refuses a coordinator with another protocol, or a deposed one."""
        theirs = welcome.protocol_version
        if theirs.major != PROTOCOL_VERSION.major:
            ours_text, theirs_text = (f"{v.major}.{v.minor}" for v in (PROTOCOL_VERSION, theirs))
            error = OperationError(
                errors_pb2.ERROR_REASON_PROTOCOL_VERSION,
                f"the coordinator speaks protocol {theirs_text} and the worker {ours_text}: update the older",
                {"worker": ours_text, "coordinator": theirs_text},
            )
            raise SessionEndError(error.message, REFUSED_BACKOFF_S, session_pb2.GOODBYE_REASON_REFUSED, error)
        if not self._epoch < welcome.epoch < EPOCH_LIMIT:
            error = OperationError(
                errors_pb2.ERROR_REASON_STALE_EPOCH,
                f"the coordinator is deposed: its epoch {welcome.epoch} is not above {self._epoch}",
            )
            raise SessionEndError(error.message, None, session_pb2.GOODBYE_REASON_REFUSED, error)
        self._take_intervals(welcome)

    def _take_intervals(self, frame: Welcome | Heartbeat) -> None:
        """Sets the interval of loads, and the permitted silence of the coordinator."""
        least_s, most_s = LOAD_INTERVALS_S
        if not least_s <= (interval_s := seconds(frame.load_interval)) <= most_s:
            raise violation(f"invalid load interval {interval_s:g} s: give {least_s:g} to {most_s:g} s")
        if not 0 < (limit_s := seconds(frame.silence_limit)) <= SILENCE_LIMIT_S:
            raise violation(
                f"invalid silence limit {limit_s:g} s: give more than 0 and at most {SILENCE_LIMIT_S:g} s"
            )
        self._load_interval_s, self._silence_limit_s = interval_s, limit_s

    async def _tell_again(self, outbox: Outbox) -> None:
        """Sends unacknowledged outcomes again, at the speed of the reader: there may be many."""
        for update in self._commands.unacknowledged:
            while outbox.waiting > FRAME_LIMIT // 2:  # noqa: ASYNC110 - gRPC's thread tells nobody
                await trio.sleep(POLL_INTERVAL_S)
            self._frames.send(ConnectRequest(command_update=update))

    async def _report_loads(self, outbox: Outbox, welcome: Welcome) -> None:
        """Sends the load within every interval, and soon after each change of a lease."""
        next_s = random.uniform(0, self._load_interval_s)
        while True:
            with trio.move_on_after(next_s) as self._next_load:
                await self._pool.slots.wait_changed()
                await trio.sleep(COALESCE_S)
            readings = await self._reporter.read_gpus()
            if self._reporter.description() != self._described:
                self._say_hello(readings)
            self._told_revision = self._pool.slots.snapshot().revision
            outbox.put_load(ConnectRequest(worker_load=self._reporter.load(readings, welcome.session_id)))
            next_s = self._load_interval_s * random.uniform(0.9, 1.1)

    def _ask(self, frame: ConnectResponse, outbox: Outbox, nursery: trio.Nursery) -> None:
        place = ExitStack()
        try:
            place.enter_context(self._queries.place(frame))
        except OperationError as error:
            if outbox.has_room and (refusal := self._queries.refuse(frame, error)):
                outbox.put_answer(refusal)
            return
        nursery.start_soon(self._answer, frame, outbox, place)

    async def _answer(self, frame: ConnectResponse, outbox: Outbox, place: ExitStack) -> None:
        """Answers a question, whose place is free once the answer is in the outbox."""
        with place:
            if (answer := await self._queries.answer(frame)) is None:
                return
            async with self._answer_turn:
                while not outbox.has_room:  # noqa: ASYNC110 - gRPC's thread tells nobody
                    await trio.sleep(POLL_INTERVAL_S)
                outbox.put_answer(answer)


def _check_command_id(command_id: str) -> None:
    """Refuses an id that is too long, or is reserved for commands of the worker itself.

    The worker's own commands have no limit on their number, and run while the worker stops.

    Raises:
        SessionEndError: The coordinator broke the protocol.
    """
    if len(command_id) > COMMAND_ID_LIMIT:
        raise violation(
            f"the command id {command_id[:COMMAND_ID_LIMIT]!r}… has {len(command_id)} characters: "
            f"use {COMMAND_ID_LIMIT} at most"
        )
    if is_local(command_id):
        raise violation(
            f"the command id {command_id!r} begins with {LOCAL_PREFIX}, which is reserved for commands of "
            "the worker: choose another id"
        )


async def _receive(frames: trio.MemoryReceiveChannel[Incoming], timeout_s: float) -> ConnectResponse:
    """The next frame.

    Raises:
        SessionEndError: The stream ended, or no frame came in time.
    """
    with trio.move_on_after(timeout_s):
        frame = await frames.receive()
        if isinstance(frame, SessionEndError):
            raise frame
        return frame
    raise SessionEndError(f"no frame from the coordinator for {timeout_s:g} s")


async def _wait_end(frames: trio.MemoryReceiveChannel[Incoming]) -> None:
    while not isinstance(await frames.receive(), SessionEndError):
        pass


def _farewell(goodbye: Goodbye) -> SessionEndError:
    known = goodbye.reason in GoodbyeReason.values()
    reason = GoodbyeReason.Name(goodbye.reason).removeprefix("GOODBYE_REASON_") if known else goodbye.reason
    why = f"the coordinator said goodbye ({reason})"
    if goodbye.HasField("error"):
        why += f": {goodbye.error.message}"
    return SessionEndError(why, REFUSED_BACKOFF_S if goodbye.reason in _FINAL_GOODBYES else None)


_INSECURE: Final = (
    "the connection to %s has no TLS: anybody on the network path can read everything, and steal the "
    "worker's token; start the coordinator without --insecure, and write its address without insecure:"
)
