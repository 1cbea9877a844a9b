"""Holds the faults of a case over the simulated host while an operation runs."""

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Final

import trio
from leasehold.v1 import operation_pb2
from leasehold_simgpu import SimulatedHost

from .arena import Arena, Stage, moves
from .cases import GPU_CONDITIONS, CaseFault, Condition, Kind, Victim

CALL_DELAY_S: Final = 0.3
"""How long a call takes during which somebody is to be killed, or a condition is to begin."""

LATE_DEATH_S: Final = 1.0

POLL_S: Final = 0.002


@asynccontextmanager
async def inject(
    arena: Arena, kind: Kind, fault: CaseFault, stage: Stage, position: int
) -> AsyncIterator[frozenset[int]]:
    """Holds a fault over one member, and takes it away afterwards.

    Yields:
        The processes of the members that the fault can concern: one, or all on the GPU of a condition.
    """
    pid = stage.pid(position)
    gpu_uuids = gpus_of(arena, kind, stage, pid, destination=fault.destination)
    hit = frozenset({pid})
    if fault.condition in GPU_CONDITIONS:
        hit = frozenset(
            other
            for other in stage.pids
            for destination in (False, True)
            if gpu_uuids & gpus_of(arena, kind, stage, other, destination=destination)
        )
    with _may_hang(arena, fault, pid):
        async with _injected(arena, fault, stage, position, pid, gpu_uuids):
            yield hit


@contextmanager
def _may_hang(arena: Arena, fault: CaseFault, pid: int) -> Iterator[None]:
    """Has calls on a member end at their deadline soon, if the fault can make them wait for ever."""
    hangs = fault.hang or fault.condition in (Condition.BUSY, Condition.MULTICAST)
    arena.hanging[pid] += hangs
    try:
        yield
    finally:
        arena.hanging[pid] -= hangs


@asynccontextmanager
async def _injected(
    arena: Arena, fault: CaseFault, stage: Stage, position: int, pid: int, gpu_uuids: frozenset[str]
) -> AsyncIterator[None]:
    if not fault.call:
        async with _held(arena, fault, pid, gpu_uuids):
            yield
        return
    before = _calls(arena, pid, fault.call)
    late = fault.condition is not None or fault.victim is not Victim.NOBODY
    arena.host.set_fault(
        fault.call,
        pid,
        error=fault.error,
        delay_s=CALL_DELAY_S if late else fault.delay_s,
        hang=fault.hang,
        signal=signal.SIGKILL if fault.crash else 0,
        signal_delay_s=LATE_DEATH_S if fault.dies_late else 0.0,
        state=fault.state,
        skip=fault.skip,
        keep_memory=fault.keep_memory,
        ignore_gpu_pairs=fault.ignore_gpu_pairs,
        times=None if fault.always else 1,
    )
    try:
        async with trio.open_nursery() as nursery:
            if fault.condition is not None:
                nursery.start_soon(_begin_in_call, arena, fault, pid, gpu_uuids, before)
            elif late:
                root = stage.pid(0 if position < stage.actors[0].size else stage.actors[0].size)
                nursery.start_soon(_kill_in_call, arena, fault, pid, root, before)
            yield
            nursery.cancel_scope.cancel()
    finally:
        arena.host.clear_faults(pid=pid)


def gpus_of(arena: Arena, kind: Kind, stage: Stage, pid: int, *, destination: bool) -> frozenset[str]:
    """The GPUs that a member is on, or was parked on; or those that the operation takes the member to."""
    process = arena.host.process(pid)
    here = frozenset(process.gpu_bytes if process else ())
    if not destination or kind not in (Kind.REMAP, Kind.SWAP):
        return here
    pairs = {pair.old_uuid: pair.new_uuid for move in moves(stage) for pair in move.pairs}
    return frozenset(pairs.get(gpu_uuid, gpu_uuid) for gpu_uuid in here)


async def _kill_in_call(arena: Arena, fault: CaseFault, pid: int, root: int, before: int) -> None:
    """Kills the victim once the call has arrived at the member."""
    await _until_called(arena, fault.call, pid, before)
    process = arena.host.process(pid)
    victim = root if fault.victim is Victim.ROOT else process and process.controller_pid
    if victim:
        with suppress(ProcessLookupError):  # another fault of the sequence has the same victim
            os.kill(victim, signal.SIGKILL)
    await trio.sleep_forever()


async def _begin_in_call(
    arena: Arena, fault: CaseFault, pid: int, gpu_uuids: frozenset[str], before: int
) -> None:
    """Begins a condition once the call has arrived at the member."""
    await _until_called(arena, fault.call, pid, before)
    async with _held(arena, fault, pid, gpu_uuids):
        await trio.sleep_forever()


async def _until_called(arena: Arena, call: str, pid: int, before: int) -> None:
    while (process := arena.host.process(pid)) and (  # noqa: ASYNC110 - the driver tells nobody
        process.calls[call] <= before or process.controller_pid is None
    ):
        await trio.sleep(POLL_S)


def _calls(arena: Arena, pid: int, call: str) -> int:
    process = arena.host.process(pid)
    return process.calls[call] if process else 0


@asynccontextmanager
async def _held(arena: Arena, fault: CaseFault, pid: int, gpu_uuids: frozenset[str]) -> AsyncIterator[None]:
    """Holds a condition. Whatever the worker has noted against a GPU is forgotten with the condition."""
    _begin(arena.host, fault, pid, gpu_uuids)
    try:
        if fault.condition is Condition.ECC:
            async with arena.looking:
                await arena.health.look()
        yield
    finally:
        with trio.CancelScope(shield=True):
            async with arena.looking:
                _end(arena.host, fault, pid, gpu_uuids)
                if fault.condition in (Condition.ECC, Condition.LOST, Condition.MIG):
                    forget = operation_pb2.ResetGpuHealthOperation(gpu_uuids=sorted(gpu_uuids))
                    await arena.cordons.reset_health(forget)


def _begin(host: SimulatedHost, fault: CaseFault, pid: int, gpu_uuids: frozenset[str]) -> None:
    match fault.condition:
        case Condition.BUSY:
            host.set_busy(pid)
        case Condition.MPS:
            host.set_mps_client(pid)
        case Condition.MULTICAST:
            host.set_multicast(pid)
        case Condition.PARTIAL_PASSTHROUGH:
            host.set_partial_passthrough(pid)
        case Condition.PROFILER:
            host.set_profiler(pid)
        case Condition.IPC_IMPORTER:
            host.set_ipc_importer(pid)
        case Condition.FULL:
            for gpu in host.gpus:
                if gpu.uuid in gpu_uuids:
                    host.hog(gpu.uuid, gpu.memory_bytes - gpu.used_bytes)
        case Condition.LOST:
            for gpu_uuid in gpu_uuids:
                host.lose_gpu(gpu_uuid)
        case condition if condition in READINGS:
            for gpu_uuid in gpu_uuids:
                host.set_readings(gpu_uuid, **{READINGS[condition]: 1})


def _end(host: SimulatedHost, fault: CaseFault, pid: int, gpu_uuids: frozenset[str]) -> None:
    if fault.condition in GPU_CONDITIONS:
        for gpu_uuid in gpu_uuids:
            host.hog(gpu_uuid, 0)
            host.lose_gpu(gpu_uuid, lost=False)
            host.set_readings(gpu_uuid, **dict.fromkeys(READINGS.values(), 0))
    elif host.process(pid) is not None:
        host.set_busy(pid, busy=False)
        host.set_mps_client(pid, enabled=False)
        host.set_multicast(pid, enabled=False)
        host.set_partial_passthrough(pid, enabled=False)
        host.set_profiler(pid, enabled=False)
        host.set_ipc_importer(pid, enabled=False)


READINGS: Final = {
    Condition.ECC: "ecc_uncorrected",
    Condition.MIG: "mig_enabled",
    Condition.HIDDEN_MEMORY: "hides_process_memory",
}
"""The reading of a GPU that makes the condition."""
