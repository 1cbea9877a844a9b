"""A workload gives its GPU away, comes back elsewhere and moves on: `python -m tests.mutants.story MUTATION`.

Needs the environment of a simulated host with three GPUs and exclusive memory. Prints as JSON how many
workloads have read a byte that they did not write, and the first error of the worker.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import trio
from leasehold.v1 import operation_pb2
from leasehold_simgpu import SimulatedHost
from leasehold_worker.commands.progress import Progress
from leasehold_worker.workloads.states import RUNNING

from tests.faults.arena import POLL_S, Actor, Arena, Outcome, Stage, open_arena
from tests.faults.cases import Kind

from .mutations import Mutation, apply

STEP_TIMEOUT_S = 30.0


async def tell(arena: Arena, first: Actor, second: Actor, third: Actor) -> None:
    """Plays the whole story, and raises where the worker refuses a step.

    Args:
        arena: A worker on three GPUs.
        first: Gives its GPU away, comes back on the next one, and moves on to the last one.
        second: Starts on the GPU of the first as soon as the pool says that it is free.
        third: Starts on the GPU that the first has moved on from.
    """
    await arena.start(first)
    await suspend_and_give_away(arena, first, second)
    restore = operation_pb2.RestoreOperation(gpu_uuids=third.home)
    await arena.operations.restore(first.running.workload_id, restore, Progress.unheard())
    first.home = third.home
    outcome = await arena.perform(Kind.REMAP, Stage([first], [arena.host.gpus[2].uuid]))
    if outcome.error is not None:
        raise outcome.error
    await arena.start(third)


async def suspend_and_give_away(arena: Arena, first: Actor, second: Actor) -> None:
    """Suspends the first. The second starts on its GPU once that is free, even during the checkpoint."""
    [pid] = first.pids
    outcomes: list[Outcome] = []

    async def suspend() -> None:
        outcomes.append(await arena.perform(Kind.SUSPEND, Stage([first])))

    fault = arena.host.set_fault("checkpoint", pid, hang=True, times=1)
    started = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(suspend)
        with trio.fail_after(STEP_TIMEOUT_S):
            while (process := arena.host.process(pid)) and not process.calls["checkpoint"]:  # noqa: ASYNC110
                await trio.sleep(POLL_S)
        if is_free(arena, first.home[0]):
            await arena.start(second)
            started = True
        arena.host.clear_faults(fault_id=fault.id)
    if outcomes[0].error is not None:
        raise outcomes[0].error
    if not started:
        await arena.start(second)


def is_free(arena: Arena, gpu_uuid: str) -> bool:
    """Whether the pool would lease a GPU now."""
    slots = arena.pool.slots.snapshot().slots
    return any(slot.gpu_uuid == gpu_uuid and slot.lease is None for slot in slots)


async def count_corrupt(arena: Arena, actors: list[Actor]) -> int:
    """Has every running workload read its memory again, and counts the workloads that saw a wrong byte."""
    corrupt = 0
    for actor in actors:
        if actor.workload is None or actor.members is None:
            continue
        if actor.running.state == RUNNING:
            await arena.progresses(actor)
        corrupt += any(actor.members.corrupt(member) for member in range(len(actor.members)))
    return corrupt


async def end_all(actors: list[Actor]) -> None:
    """Kills every workload: a worker with wrong leases may be unable to stop them."""
    for actor in actors:
        if actor.workload is not None and actor.running.returncode is None:
            os.kill(actor.running.root.pid, signal.SIGKILL)
            with trio.fail_after(STEP_TIMEOUT_S):
                await actor.running.ended.wait()


async def play(host: SimulatedHost, folder: Path) -> dict[str, object]:
    """Plays the story and counts. A worker with a defect may fail at any step: that only ends the story."""
    gpus = [gpu.uuid for gpu in host.gpus]
    actors = [Actor("first", 1, [gpus[0]]), Actor("second", 1, [gpus[0]]), Actor("third", 1, [gpus[1]])]
    failure = ""
    async with open_arena(host, folder) as arena:
        try:
            await tell(arena, *actors)
        except Exception as error:
            failure = repr(error)
        corrupt = await count_corrupt(arena, actors)
        await end_all(actors)
    return {"corrupt": corrupt, "failure": failure}


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mutation", type=Mutation, choices=list(Mutation))
    apply(parser.parse_args().mutation)
    host = SimulatedHost.open(os.environ["LEASEHOLD_SIMGPU_DIR"])
    with tempfile.TemporaryDirectory() as folder:
        result = trio.run(play, host, Path(folder))
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
