"""A sample of what can go wrong while workloads are parked and woken. `make strategies` plays all of it."""

import itertools

import pytest
from leasehold_worker.crash_points import PARKING_CRASH_POINTS

from .fleets import Fleet
from .strategy_arena import NOT_PLAYED, Arena, play_all
from .strategy_cases import PROCESSES, Case, Kind, grid, sample

CHOSEN = (
    "offload+keep_running down: server /sleep break",
    "offload+keep_running up: server /wake_up 500 x3",
    "discard+cuda_suspend down: driver checkpoint error=999",
    "offload+cuda_suspend up: driver restore error=999",
    "discard+cuda_suspend up: server /collective_rpc reload_weights 500",
    "offload+checkpoint down: criu full",
    "discard+checkpoint up: disk altered",
    "retain+checkpoint up: port taken",
    "retain+stop down: server kernel.checkpoint raise",
    "sglang offload+keep_running down: server /release_memory_occupation break",
    "sglang discard+cuda_suspend up: server /update_weights_from_disk 500",
    "retain+stop up: server kernel.restore raise",
    "retain+stop up: program gone",
)
KILLED = (
    "offload+keep_running up: kill phase-hooks",
    "offload+cuda_suspend down: kill phase-checkpoint",
    "offload+checkpoint down: kill image-final",
    "discard+checkpoint up: kill phase-restore",
    "retain+checkpoint up: kill phase-unlock",
    "retain+stop down: kill intent-ending",
    "offload+checkpoint after keep_running down: kill intent-image",
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
    kills = {case.trouble.where for case in grid() if case.trouble.kind is Kind.KILL}
    assert set(PARKING_CRASH_POINTS) <= kills
    assert len({str(case) for case in grid()}) == len(grid())
    assert sample(5, 1) == sample(5, 1) != sample(5, 2)


@pytest.mark.parametrize("beginnings", [CHOSEN, KILLED], ids=["troubles", "kills"])
def test_what_goes_wrong_leaves_a_workload_as_before_or_as_asked(
    empty_fleet: Fleet, beginnings: tuple[str, ...]
) -> None:
    arena = Arena(empty_fleet)
    tally = play_all(arena, chosen(*beginnings))
    assert not tally.problems, "\n".join(tally.problems)
    assert sum(tally.outcomes.values()) == len(beginnings)
    why_not = arena.why_no_images()
    arena.stop()
    if tally.outcomes[NOT_PLAYED]:
        pytest.skip(f"{tally.outcomes[NOT_PLAYED]} of {len(beginnings)} cases: {why_not}")
