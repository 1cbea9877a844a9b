"""Commands that have just ended are found in memory, of which they take no more than they may."""

from pathlib import Path

import pytest
from leasehold.v1.command_pb2 import Command
from leasehold_coordinator.core import command_states
from leasehold_coordinator.fleet.recent_commands import RECENT_BYTES, RECENT_LIMIT, RecentCommands

from tests.coordinator.bench import Bench, on_bench


@pytest.mark.parametrize(("phase_bytes", "kept"), [(0, RECENT_LIMIT), (RECENT_BYTES // 10, 9)])
def test_the_newest_are_kept_within_both_limits(phase_bytes: int, kept: int) -> None:
    recent = RecentCommands()
    ids = [f"c-{number}" for number in range(RECENT_LIMIT + 5)]
    for command_id in ids:
        recent.add(Command(command_id=command_id, phase="x" * phase_bytes))
    assert [command_id for command_id in ids if recent.get(command_id)] == ids[-kept:]


def test_one_that_is_too_large_is_not_kept() -> None:
    recent = RecentCommands()
    recent.add(Command(command_id="c-1", phase="x" * RECENT_BYTES))
    recent.add(Command(command_id="c-2"))
    assert recent.get("c-1") is None
    assert recent.get("c-2") is not None


def test_a_command_that_has_just_ended_is_found_without_the_disk(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.send()
        await bench.update(command_states.SUCCEEDED)
        stored = await bench.stored()
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.delattr(type(bench.store), "find_command")
            assert await bench.fleet.reader.find_command("c-1") == stored

    on_bench(tmp_path, scenario)
