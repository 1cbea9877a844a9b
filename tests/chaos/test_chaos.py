"""A sample of the chaos suite, and the judge before a doctored record. ``make chaos N=1000`` runs more."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_coordinator.crash_points import CRASH_POINTS
from leasehold_worker.commands.journal import open_journal
from leasehold_worker.commands.journal_file import keep_workload
from leasehold_worker.commands.journal_records import workload_record
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.workloads.states import EXITED, state_text
from leasehold_worker.workloads.workload import Workload

from tests.environment import seed

from .fleet import ChaosFleet, chaos_fleet
from .judge import RUNNING, STEPS, SUCCEEDED, SUSPENDED, Asked, Seen, judge
from .namespaces import HOSTS, NET, PORT, inside, namespaces, partition, separated_fleet, ways
from .runner import broken_journal, play
from .scenarios import TROUBLES, crash_at, why_no_namespaces

COMMANDS = 2
UNKNOWN = workload_pb2.WORKLOAD_STATE_UNKNOWN


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[ChaosFleet]:
    with chaos_fleet(tmp_path) as started:
        yield started


@pytest.mark.long
@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_coordinator_that_dies_anywhere_loses_and_doubles_nothing(fleet: ChaosFleet, point: str) -> None:
    reached: set[str] = set()
    assert not play(fleet, crash_at("coordinator", point, reached), 1, COMMANDS).wrong
    assert reached == {point}


@pytest.mark.long
@pytest.mark.parametrize("point", ["command-settled", "phase-rollback"])
def test_a_worker_that_dies_on_the_way_back_loses_and_doubles_nothing(fleet: ChaosFleet, point: str) -> None:
    reached: set[str] = set()
    assert not play(fleet, crash_at("alpha", point, reached), 1, COMMANDS).wrong
    assert reached == {point}


@pytest.mark.long
@pytest.mark.parametrize("name", TROUBLES)
def test_whatever_happens_nothing_is_lost_or_doubled(fleet: ChaosFleet, name: str) -> None:
    assert not play(fleet, TROUBLES[name], seed(), COMMANDS, claims=name == "kill").wrong


@pytest.mark.long
@pytest.mark.usefixtures("executed")
def test_programs_that_are_killed_lose_and_double_nothing(fleet: ChaosFleet) -> None:
    assert not play(fleet, TROUBLES["kill"], 7, COMMANDS, claims=True).wrong


@pytest.mark.long
@pytest.mark.minutes
@pytest.mark.timeout(900)
def test_a_sample_that_changes_each_day_loses_and_doubles_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.runner", "--commands", "300", "--seed", str(seed())],
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
        timeout=800,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
def test_a_partition_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with separated_fleet(tmp_path) as fleet:
        assert not play(fleet, partition, 1, COMMANDS).wrong


@pytest.mark.long
@pytest.mark.skipif(bool(why_no_namespaces()), reason=why_no_namespaces())
def test_each_way_of_a_partition_cuts_and_heals() -> None:
    listen = (
        f"import signal, socket; s = socket.create_server(('', {PORT})); print(flush=True); signal.pause()"
    )
    where = (f"{NET}.{HOSTS['coordinator']}", PORT)
    connect = f"import socket; socket.create_connection({where!r}, timeout=0.3)"

    def is_reached() -> bool:
        command = [*inside("alpha"), sys.executable, "-c", connect]
        return subprocess.run(command, capture_output=True, check=False, timeout=30).returncode == 0

    server = [*inside("coordinator"), sys.executable, "-c", listen]
    with namespaces(), subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            for way in ways():
                for sender, receiver in (("alpha", "coordinator"), ("coordinator", "alpha")):
                    with way(sender, receiver):
                        assert not is_reached(), (way, sender)
                    assert any(is_reached() for _ in range(20)), (way, sender)
        finally:
            process.kill()


@pytest.mark.long
def test_workers_come_back_to_a_coordinator_that_has_lost_its_store(fleet: ChaosFleet) -> None:
    assert not play(fleet, lambda *_: None, 1, 2).wrong
    epochs = {name: (fleet.folder / name / "epoch").read_text() for name in fleet.hosts}
    fleet.kill("coordinator")
    for path in fleet.folder.glob("store.sqlite3*"):
        path.unlink()
    fleet.heal()
    assert not play(fleet, lambda *_: None, 2, 2).wrong
    for name, before in epochs.items():
        assert int((fleet.folder / name / "epoch").read_text()) > int(before)


RUN = Asked("run", frozenset({"c1"}), SUCCEEDED)
SUSPEND = Asked("suspend", frozenset({"c2"}), SUCCEEDED, ended_at=1)
RESTORE = Asked("restore", frozenset({"c3"}), SUCCEEDED, ended_at=2)
GPU = frozenset({"GPU-1"})
WHOLE = Seen(
    "w",
    (RUN,),
    RUNNING,
    lease=GPU,
    listed=GPU,
    starts=1,
    driver_state="RUNNING",
    memory=GPU,
    counts=(5, 6, 7),
    last_gpu="GPU-1",
    calls=dict.fromkeys(STEPS, 0),
)


def test_the_judge_finds_nothing_where_all_is_well() -> None:
    parked = replace(
        WHOLE,
        asked=(RUN, SUSPEND),
        state=SUSPENDED,
        lease=frozenset(),
        listed=frozenset(),
        driver_state="CHECKPOINTED",
        memory=frozenset(),
        calls={"lock": 1, "checkpoint": 1, "restore": 0, "unlock": 0},
    )
    repeated = replace(WHOLE, calls={**dict.fromkeys(STEPS, 0), "unlock": 1}, worker_starts=1)
    verdict = judge([WHOLE, parked, repeated])
    assert (verdict.wrong, verdict.asked, verdict.done_once) == ([], 4, 4)


@pytest.mark.parametrize(
    ("doctor", "found"),
    [
        (lambda seen: replace(seen, starts=2), "began 2 times"),
        (lambda seen: replace(seen, starts=0), "began 0 times"),
        (
            lambda seen: replace(seen, asked=(replace(RUN, state=command_pb2.COMMAND_STATE_FAILED),)),
            "run is not done",
        ),
        (lambda seen: replace(seen, asked=(replace(RUN, command_ids=frozenset({"a", "b"})),)), "became"),
        (
            lambda seen: replace(seen, asked=(replace(RUN, state=command_pb2.COMMAND_STATE_UNKNOWN),)),
            "has not ended",
        ),
        (lambda seen: replace(seen, asked=(RUN, SUSPEND)), "suspend SUCCEEDED, and it is"),
        (lambda seen: replace(seen, listed=frozenset()), "its lease is"),
        (lambda seen: replace(seen, memory=frozenset({"GPU-2"})), "not a lease there"),
        (lambda seen: replace(seen, driver_state="LOCKED"), "left LOCKED"),
        (lambda seen: replace(seen, counts=(5, 7)), "counts are missing"),
        (
            lambda seen: replace(seen, state=workload_pb2.WORKLOAD_STATE_UNKNOWN),
            "it is WORKLOAD_STATE_UNKNOWN",
        ),
        (lambda seen: replace(seen, state=SUSPENDED), "it is parked, and RUNNING"),
        (lambda seen: replace(seen, last_gpu="GPU-2"), "it counts on GPU-2"),
        (lambda seen: replace(seen, asked=(RUN, SUSPEND, RESTORE)), "1 calls of unlock are told, and 0"),
        (
            lambda seen: replace(seen, calls={**dict.fromkeys(STEPS, 0), "restore": 1}),
            "1 calls of restore, and 0",
        ),
    ],
)
def test_the_judge_finds_what_is_wrong(doctor: Callable[[Seen], Seen], found: str) -> None:
    assert any(found in text for text in judge([doctor(WHOLE)]).wrong)


async def test_a_record_that_breaks_an_invariant_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite3"
    root = ProcessIdentity(Pid(2**22 + 1), 1)
    async with open_journal(path) as journal:
        for state in (RUNNING, SUSPENDED, EXITED):
            name = state_text(state)
            workload = Workload(name, name, WorkloadSpec(), root, path, datetime.now(UTC), None, state=state)
            journal.put(("workloads", name), keep_workload(workload_record(workload, "boot")))
        await journal.wait_settled()
        assert broken_journal(path) == ["SUSPENDED is SUSPENDED, and has no record of its suspend"]
