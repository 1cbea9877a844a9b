"""The present release beside a real older one: upgrades in both orders while counters run."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.fleets import Fleet, make_fleet
from tests.older_release import needs_older_release, unpack_older

KEEP = 'stop_workloads = "leave"\n'
COUNTERS = ("first", "second")

pytestmark = [pytest.mark.long, needs_older_release]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the older release."""
    return unpack_older(tmp_path_factory.mktemp("older"))


@pytest.fixture
def fleet(tmp_path: Path, older: Path) -> Iterator[Fleet]:
    """A coordinator and the worker ``alpha`` of the older release, with two counters."""
    with make_fleet(tmp_path, checkout=older) as started:
        started.start_worker("alpha", gpus=2, settings=KEEP)
        for name in COUNTERS:
            started.run_counter(name)
        yield started
        for name in COUNTERS:
            started.cli("stop", name)


def upgrade_coordinator(fleet: Fleet) -> None:
    """Ends the coordinator, and starts that of the present release."""
    fleet.end("coordinator", signal.SIGTERM)
    fleet.checkout = None
    fleet.start_coordinator()
    fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_CONNECTED")


def upgrade_worker(fleet: Fleet) -> None:
    """Ends the worker, and starts that of the present release."""
    fleet.end("alpha", signal.SIGTERM)
    fleet.checkout = None
    fleet.start_worker("alpha", settings=KEEP)


def use(fleet: Fleet) -> None:
    """A suspend, a restore and an exchange of GPUs, each in effect. No counter loses a count."""
    before = fleet.leases()
    fleet.cli("suspend", "first")
    assert fleet.leases() == {slot: name for slot, name in before.items() if name == "second"}
    fleet.cli("restore", "first")
    fleet.cli("remap", "--swap", *COUNTERS)
    assert fleet.leases() == dict(zip(before, reversed(before.values()), strict=True))
    for name in COUNTERS:
        fleet.wait_counting(name)


@pytest.mark.parametrize(
    "order",
    [(upgrade_coordinator, upgrade_worker), (upgrade_worker, upgrade_coordinator)],
    ids=["coordinator first", "worker first"],
)
def test_counters_run_on_while_both_sides_are_upgraded(
    fleet: Fleet, order: tuple[Callable[[Fleet], None], ...]
) -> None:
    use(fleet)
    processes = {name: fleet.client.workload(name).status.root_pid for name in COUNTERS}
    for upgrade in order:
        upgrade(fleet)
        use(fleet)
    assert {name: fleet.client.workload(name).status.root_pid for name in COUNTERS} == processes


def test_the_older_coordinator_refuses_the_store_and_leaves_it(fleet: Fleet, older: Path) -> None:
    upgrade_coordinator(fleet)
    fleet.end("coordinator", signal.SIGTERM)
    fleet.checkout = older
    with pytest.raises(AssertionError, match=r"store\.sqlite3 can't be used"):
        fleet.start_coordinator()
    fleet.end("coordinator")
    fleet.checkout = None
    fleet.start_coordinator()
    fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_CONNECTED")
    for name in COUNTERS:
        fleet.wait_counting(name)
