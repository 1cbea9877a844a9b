"""Samples of what can go wrong while workloads are parked and woken. `make strategies` plays all of it."""

import itertools

import pytest
from leasehold_worker.crash_points import PARKING_CRASH_POINTS

from tests.environment import seed

from .fleets import Fleet
from .mutual_tls import local_only
from .strategy_arena import NOT_PLAYED, Arena, play_all
from .strategy_cases import PROCESSES, Case, Kind, grid, sample

LONG_CASES = 30
grid_is_local = local_only(
    "the cases take minutes, a quarter of them needs images, and what goes wrong is on the worker's host"
)
FEW = (
    "offload+keep_running up: server /wake_up 500 x3",
    "discard+cuda_suspend down: driver checkpoint error=999",
    "discard+checkpoint up: disk altered",
    "sglang discard+cuda_suspend up: server /update_weights_from_disk 500",
    "sglang discard+cuda_suspend up: kill hook-noted",
    "offload+cuda_suspend down: kill phase-checkpoint",
)
TROUBLES = (
    "offload+keep_running down: server /sleep break",
    "offload+cuda_suspend up: driver restore error=999",
    "discard+cuda_suspend up: server /collective_rpc reload_weights 500",
    "offload+checkpoint down: criu full",
    "retain+checkpoint up: port taken",
    "retain+stop down: server kernel.checkpoint raise",
    "sglang offload+keep_running down: server /release_memory_occupation break",
    "retain+stop up: server kernel.restore raise",
    "retain+stop up: program gone",
    "offload+cuda_suspend up: gpu ecc",
    "2 GPUs offload+cuda_suspend down: driver checkpoint error=999 member=1",
    "2 GPUs retain+cuda_suspend up: gpu ecc member=1",
)
KILLS = (
    "offload+keep_running up: kill phase-hooks",
    "offload+checkpoint down: kill image-final",
    "discard+checkpoint up: kill phase-restore",
    "retain+checkpoint up: kill phase-unlock",
    "retain+stop down: kill intent-ending",
    "offload+checkpoint after keep_running down: kill intent-image",
    "2 GPUs offload+cuda_suspend up: kill intent-restore",
)


def chosen(*beginnings: str) -> list[Case]:
    """The cases of the grid that begin so, one each."""
    cases = []
    for beginning in beginnings:
        found = [case for case in grid() if str(case).startswith(beginning)]
        assert len(found) == 1, (beginning, list(map(str, found)))
        cases += found
    return cases


def test_the_grid_has_every_policy_both_ways() -> None:
    ways = {(case.policy, case.way) for case in grid() if not case.before}
    assert len(ways) == (3 * len(PROCESSES) - 1) * 2, "retain+keep_running frees nothing, and does nothing"
    steps = [(case.before, case.process) for case in grid() if case.before]
    assert set(steps) == set(itertools.combinations(PROCESSES, 2))
    assert {case.trouble.kind for case in grid()} == set(Kind)
    assert {case.gpus for case in grid()} == {1, 2}
    kills = {case.trouble.where for case in grid() if case.trouble.kind is Kind.KILL}
    assert set(PARKING_CRASH_POINTS) <= kills
    assert len({str(case) for case in grid()}) == len(grid())
    assert sample(5, 1) == sample(5, 1) != sample(5, 2)


def play(fleet: Fleet, cases: list[Case]) -> None:
    arena = Arena(fleet)
    tally = play_all(arena, cases)
    assert not tally.problems, "\n".join(tally.problems)
    assert sum(tally.outcomes.values()) == len(cases)
    why_not = arena.why_no_images()
    arena.stop()
    if tally.outcomes[NOT_PLAYED]:
        pytest.skip(f"{tally.outcomes[NOT_PLAYED]} of {len(cases)} cases: {why_not}")


@pytest.mark.long
@grid_is_local
@pytest.mark.parametrize(
    "beginnings",
    [
        pytest.param(FEW, id="few"),
        pytest.param(TROUBLES, id="troubles"),
        pytest.param(KILLS, id="kills"),
    ],
)
def test_what_goes_wrong_leaves_a_workload_as_before_or_as_asked(
    empty_fleet: Fleet, beginnings: tuple[str, ...]
) -> None:
    play(empty_fleet, chosen(*beginnings))


@pytest.mark.long
@pytest.mark.minutes
@grid_is_local
def test_a_sample_that_changes_each_day_leaves_workloads_as_before_or_as_asked(empty_fleet: Fleet) -> None:
    play(empty_fleet, sample(LONG_CASES, seed()))
