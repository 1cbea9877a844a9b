"""Workloads on a simulated host under the worker's own operations, with faults put in their way."""

import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Final
from unittest.mock import patch

import trio
from leasehold.v1 import gpu_pb2, operation_pb2, workload_pb2
from leasehold_simgpu import SimulatedHost, SimulatedProcess
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.helper_protocol import Reply, Request
from leasehold_worker.errors import OperationError
from leasehold_worker.workloads.states import ENDED, RUNNING, SUSPENDED
from leasehold_worker.workloads.workload import Workload

from .cases import Kind
from .member import PROGRAM, PROGRESS_ROUNDS, Members

CALL_FLOOR_S: Final = 1.5
"""Deadline of calls on members that may hang."""
UNDISTURBED_S: Final = 20.0
"""Further time for the calls on all other members. They take long only where the machine is busy."""
LOCK_TIMEOUT_S: Final = 0.2
"""Timeout of locks that may wait for work that never drains."""
PROOF_TIMEOUT_S: Final = 0.4
MEMBER_INTERVAL_S: Final = 0.02
SETUP_TIMEOUT_S: Final = 30.0
PROGRESS_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.002


@dataclass(slots=True)
class Actor:
    """A workload of the suite, with the GPUs that are its home.

    Attributes:
        name: Unique in the arena.
        size: Number of its members.
        home: GPUs that it starts on.
    """

    name: str
    size: int
    home: list[str]
    workload: Workload | None = None
    members: Members | None = None
    starts: int = 0

    @property
    def running(self) -> Workload:
        """Its workload, which was started."""
        assert self.workload is not None
        return self.workload

    @property
    def pids(self) -> list[int]:
        """Processes of its members."""
        assert self.members is not None
        return list(self.members.pids)


@dataclass(slots=True)
class Stage:
    """The actors of one case at a time, on GPUs of their own.

    Attributes:
        actors: One, or two that swap.
        spare: GPUs that the only actor moves to.
    """

    actors: list[Actor]
    spare: list[str] = field(default_factory=list)

    @property
    def pids(self) -> list[int]:
        """The processes of all members, those of the first actor first."""
        return [pid for actor in self.actors for pid in actor.pids]

    def pid(self, position: int) -> int:
        """The process of a member, counted over all actors."""
        return self.pids[position]


@dataclass(slots=True)
class Outcome:
    """What an operation said that it did."""

    progress: Progress
    error: OperationError | None


class Arena:
    """The worker's parts, and a simulated host below."""

    def __init__(self, host: SimulatedHost, parts: Parts, folder: Path) -> None:
        self.host = host
        self.pool = parts.pool
        self.host_memory = parts.host_memory
        self.workloads = parts.workloads
        self.operations = parts.operations
        self.termination = parts.termination
        self.health = parts.health
        self.cordons = parts.cordons
        self.hanging: Counter[int] = Counter()
        """Members on which a call may hang at present, with the number of reasons."""
        self.looking = trio.Lock()
        """Held by whoever has the worker look at the GPUs: a look may not bring back what was just mended."""
        self._folder = folder

    async def start(self, actor: Actor) -> None:
        """Starts an actor's workload on its home, and waits until all members count."""
        actor.starts += 1
        path = self._folder / f"{actor.name}-{actor.starts}.members"
        actor.members = Members(path)
        spec = workload_pb2.WorkloadSpec(
            arguments=[
                *(sys.executable, str(PROGRAM), "--file", str(path), "--members", str(actor.size)),
                *("--interval-s", str(MEMBER_INTERVAL_S)),
            ],
            resources=workload_pb2.Resources(gpu_count=len(actor.home)),
        )
        workload_id = f"{actor.name}-{actor.starts}"
        run = operation_pb2.RunOperation(name=workload_id, spec=spec, gpu_uuids=actor.home)
        await self.operations.run(workload_id, run, Progress.unheard())
        actor.workload = self.workloads.get(workload_id)
        await self._until(actor.members.is_ready, f"{workload_id} is ready")

    async def end(self, workload: Workload) -> None:
        """Ends a workload, whatever its state."""
        if workload.state not in ENDED:
            stop = operation_pb2.StopOperation(force=True)
            stop.grace.FromMilliseconds(0)
            await self.termination.stop(workload.workload_id, stop, Progress.unheard())

    async def end_all(self) -> None:
        """Ends every workload."""
        for workload in self.workloads.all():
            await self.end(workload)

    async def perform(self, kind: Kind, stage: Stage) -> Outcome:
        """Does an operation on a stage's actors."""
        workload_id = stage.actors[0].running.workload_id
        match kind:
            case Kind.SUSPEND:
                suspend = operation_pb2.SuspendOperation()
                suspend.lock_timeout.FromTimedelta(self._lock_timeout(stage))
                return await _attempted(
                    lambda progress: self.operations.suspend(workload_id, suspend, progress)
                )
            case Kind.RESTORE:
                restore = operation_pb2.RestoreOperation(gpu_uuids=self._free(stage.actors[0].home))
                return await _attempted(
                    lambda progress: self.operations.restore(workload_id, restore, progress)
                )
            case Kind.REMAP | Kind.SWAP:
                remap = operation_pb2.RemapOperation(moves=moves(stage))
                remap.lock_timeout.FromTimedelta(self._lock_timeout(stage))
                return await _attempted(lambda progress: self.operations.remap(remap, progress))

    def _lock_timeout(self, stage: Stage) -> timedelta:
        """Short if a lock of a member of the stage may wait for ever."""
        is_short = any(self.hanging[pid] for pid in stage.pids)
        return timedelta(seconds=LOCK_TIMEOUT_S if is_short else UNDISTURBED_S)

    def live(self, actor: Actor) -> list[SimulatedProcess]:
        """The members of an actor that live, as the simulated driver has them."""
        found = (self.host.process(pid) for pid in sorted(set(actor.pids)))
        return [process for process in found if process is not None]

    async def bring_home(self, stage: Stage) -> None:
        """Brings every actor back to its home, running. An actor that is not whole starts anew."""
        if all(actor.workload and _is_away(actor) for actor in stage.actors):
            await self.perform(Kind.SWAP if len(stage.actors) == 2 else Kind.REMAP, stage)
        for actor in stage.actors:
            if actor.workload is not None and not self._is_home(actor):
                await self.end(actor.running)
        for actor in stage.actors:
            if actor.workload is None or actor.running.state in ENDED:
                await self.start(actor)

    def _is_home(self, actor: Actor) -> bool:
        """Whether an actor runs with all members at home, and none of them is corrupt."""
        assert actor.members is not None
        corrupt = any(actor.members.corrupt(member) for member in range(actor.size))
        whole = actor.running.state == RUNNING and len(self.live(actor)) == actor.size and not corrupt
        return whole and list(_held(actor)) == actor.home

    async def wake(self, actor: Actor) -> OperationError | None:
        """Restores a workload from wherever it was left. None: it runs, or a stuck one is on its home."""
        workload_id = actor.running.workload_id
        restore = operation_pb2.RestoreOperation()
        if actor.running.state == SUSPENDED:
            if not self._free(actor.home):
                return None
            restore.gpu_uuids.extend(actor.home)
        outcome = await _attempted(lambda progress: self.operations.restore(workload_id, restore, progress))
        return outcome.error

    def _free(self, gpu_uuids: Sequence[str]) -> Sequence[str]:
        """The GPUs if all of them are free, else none."""
        free = {slot.gpu_uuid for slot in self.pool.slots.snapshot().slots if slot.lease is None}
        return gpu_uuids if free.issuperset(gpu_uuids) else ()

    async def progresses(self, actor: Actor) -> bool:
        """Whether every member that lives, and goes on living, counts on within a while."""
        members = actor.members
        assert members is not None
        since = members.all_rounds()

        def stand_still() -> bool:
            pairs = zip(members.pids, since, members.all_rounds(), strict=True)
            still = {pid for pid, then, now in pairs if now < then + PROGRESS_ROUNDS}
            return bool(still) and any(process.pid in still for process in self.live(actor))

        with trio.move_on_after(PROGRESS_TIMEOUT_S):
            while stand_still():  # noqa: ASYNC110 - the members tell by a file
                await trio.sleep(POLL_S)
            return True
        return False

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        with trio.move_on_after(SETUP_TIMEOUT_S):
            while not condition():  # noqa: ASYNC110 - the members tell by a file
                await trio.sleep(POLL_S)
            return
        raise AssertionError(f"{what}: not within {SETUP_TIMEOUT_S:g} s")


async def _attempted(operation: Callable[[Progress], Awaitable[None]]) -> Outcome:
    progress = Progress.unheard()
    try:
        await operation(progress)
    except OperationError as error:
        return Outcome(progress, error)
    return Outcome(progress, None)


def moves(stage: Stage) -> list[operation_pb2.Move]:
    """Where the actors go: to each other's GPUs, or the only one to the spare ones or back.

    A workload that was given up may hold fewer GPUs than it had, and then its move is refused anyway.
    """
    here = [list(_held(actor)) or actor.home for actor in stage.actors]
    if len(here) == 2:
        there = here[::-1]
    else:
        there = [stage.spare if here[0] == stage.actors[0].home else stage.actors[0].home]
    return [
        operation_pb2.Move(
            workload_id=actor.running.workload_id,
            pairs=[gpu_pb2.GpuPair(old_uuid=a, new_uuid=b) for a, b in zip(old, new, strict=False)],
        )
        for actor, old, new in zip(stage.actors, here, there, strict=True)
    ]


def _is_away(actor: Actor) -> bool:
    return actor.running.state == RUNNING and list(_held(actor)) != actor.home


def _held(actor: Actor) -> Sequence[str]:
    return actor.running.lease.gpu_uuids if actor.running.lease else ()


@asynccontextmanager
async def open_arena(host: SimulatedHost, folder: Path) -> AsyncIterator[Arena]:
    """Opens an arena on a simulated host whose libraries this process was started with."""
    config = WorkerConfig(driver_call_floor_s=CALL_FLOOR_S, proof_timeout_s=PROOF_TIMEOUT_S)
    async with open_parts(config, folder, lambda _: None) as parts:
        assert parts.inventory.unavailable_reason is None, "start this process with the host's environment"
        arena = Arena(host, parts, folder)
        call = parts.driver.call

        async def patient(request: Request, extra_s: float = 0.0) -> Reply:
            return await call(request, extra_s + (0.0 if arena.hanging[request.pid] else UNDISTURBED_S))

        with patch.object(parts.driver, "call", patient):
            try:
                yield arena
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(SETUP_TIMEOUT_S):
                    await arena.end_all()
