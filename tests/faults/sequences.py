"""Sequences of operations and faults that hypothesis makes up: `python -m tests.faults.sequences`.

Unlike the grid, nothing is put right between two steps, and two things may go wrong at once. A sequence that
ends in something that was not said is made as short as possible, and printed.
"""

import argparse
import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import trio
import trio.from_thread
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from leasehold_simgpu import SimulatedHost
from leasehold_worker.workloads.states import RUNNING, SUSPENDED

from .arena import Arena, Stage, open_arena
from .cases import CaseFault, Kind, all_faults
from .playing import act, make_stages, recovered, set_order
from .verdict import concerned, locked

LENGTH: Final = 6
SIZE: Final = 2


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """An operation, with what goes wrong with it, and on which member."""

    kind: Kind
    faults: tuple[tuple[CaseFault, int], ...]


def steps(kinds: tuple[Kind, ...], members: int) -> st.SearchStrategy[list[SequenceStep]]:
    """Sequences over some operations, for a stage of so many members."""

    def of(kind: Kind) -> st.SearchStrategy[SequenceStep]:
        placed = st.tuples(st.sampled_from(list(all_faults(kind))), st.integers(0, members - 1))
        return st.builds(SequenceStep, st.just(kind), st.lists(placed, max_size=2).map(tuple))

    return st.lists(st.sampled_from(kinds).flatmap(of), min_size=1, max_size=LENGTH)


async def play_sequence(
    arena: Arena, stage: Stage, sequence: list[SequenceStep], *, sequential: bool
) -> None:
    """Plays one sequence, and fails where something is not as it was said."""
    await arena.bring_home(stage)
    set_order(stage, sequential=sequential)
    for step in sequence:
        if any(len(arena.live(actor)) < actor.size for actor in stage.actors):
            return  # the dead are replaced before the next sequence
        ready = SUSPENDED if step.kind is Kind.RESTORE else RUNNING
        may_fail = any(actor.running.state != ready for actor in concerned(stage, step.kind))
        done = await act(arena, stage, step.kind, step.faults, may_fail=may_fail)
        # Nothing helps a member that the driver never unlocks; that it is named so is among the problems.
        stubborn = any(fault.call == "unlock" and fault.always for fault, _ in step.faults)
        check(done.problems, [] if stubborn else done.left_locked)
        if done.lost_by_driver:
            return  # corrupt workloads are replaced before the next sequence
        if done.misplaced:
            break
    done = await recovered(arena, stage, Kind.RESTORE, done)
    check(done.problems, locked(arena, stage))


def check(problems: list[str], left_locked: list[int]) -> None:
    """Fails if there are any."""
    assert not problems, "; ".join(problems)
    assert not left_locked, f"left LOCKED: {left_locked}"


def explore(arena: Arena, stage: Stage, kinds: tuple[Kind, ...], examples: int, number: int) -> None:
    """Has hypothesis look for a sequence that fails. Runs in a thread beside the arena's trio."""
    members = sum(actor.size for actor in stage.actors)

    @seed(number)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(sequence=steps(kinds, members), sequential=st.booleans())
    def every_sequence_ends_whole(sequence: list[SequenceStep], sequential: bool) -> None:
        async def play() -> None:
            await play_sequence(arena, stage, sequence, sequential=sequential)

        trio.from_thread.run(play)

    every_sequence_ends_whole()


async def explore_all(host: SimulatedHost, folder: Path, examples: int, number: int) -> None:
    """Explores one workload alone, and two that swap."""
    async with open_arena(host, folder) as arena:
        stages = make_stages([gpu.uuid for gpu in host.gpus])
        alone, swapping = stages[Kind.REMAP, SIZE], stages[Kind.SWAP, SIZE]
        async with trio.open_nursery() as nursery:
            for stage, kinds in (
                (alone, (Kind.SUSPEND, Kind.RESTORE, Kind.REMAP)),
                (swapping, (Kind.SUSPEND, Kind.RESTORE, Kind.SWAP)),
            ):
                nursery.start_soon(trio.to_thread.run_sync, explore, arena, stage, kinds, examples, number)


def main() -> None:
    """Runs the command line, on the simulated host of the environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=50, metavar="N", help="sequences of each sort")
    parser.add_argument("--seed", type=int, default=1, help="which")
    options = parser.parse_args()
    host = SimulatedHost.open(os.environ["LEASEHOLD_SIMGPU_DIR"])
    with tempfile.TemporaryDirectory() as folder:
        work = partial(explore_all, host, Path(folder), options.examples, options.seed)
        trio.run(work, strict_exception_groups=True)


if __name__ == "__main__":
    main()
