"""Bad input: one clear line with the reason and the remedy, the documented exit code, and nothing changed."""

import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from .fleets import Fleet, make_fleet

NOWHERE = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        ("suspend nobody", 1, r"no workload has the id or name 'nobody'.*\(UNKNOWN_WORKLOAD\)"),
        pytest.param("restore nobody", 1, "UNKNOWN_WORKLOAD", marks=pytest.mark.long),
        pytest.param("stop nobody", 1, "UNKNOWN_WORKLOAD", marks=pytest.mark.long),
        pytest.param("logs nobody", 1, "UNKNOWN_WORKLOAD", marks=pytest.mark.long),
        pytest.param("get workloads nobody", 1, "UNKNOWN_WORKLOAD", marks=pytest.mark.long),
        ("get workers nobody", 1, r"the known workers are alpha \(UNKNOWN_WORKER\)"),
        pytest.param("get commands c-1", 1, "UNKNOWN_COMMAND", marks=pytest.mark.long),
        pytest.param("run --worker nobody -- true", 1, "UNKNOWN_WORKER", marks=pytest.mark.long),
        ("run --gpus 3 -- true", 1, r"alpha: 2 GPUs, 1 free, 1 leased.*\(NO_FREE_GPU\)"),
        ("run --name 1bad -- true", 2, r"invalid name '1bad'.*\(INVALID_ARGUMENT\)"),
        ("run --name one -- true", 1, r"with the name or id 'one' has not ended.*\(WORKLOAD_EXISTS\)"),
        ("run --env NOVALUE -- true", 2, "invalid variable 'NOVALUE': write NAME=VALUE"),
        (
            "run --name x -- /no/such/program",
            1,
            r"'/no/such/program' could not be started: No such file or directory; .*\(SPAWN_FAILED\)",
        ),
        pytest.param(
            "suspend", 2, "name a workload, or choose some by -l, --filter or --all", marks=pytest.mark.long
        ),
        ("suspend one --worker alpha", 2, "--worker suspends everything on a worker"),
        pytest.param(
            "suspend --worker alpha --dry-run",
            2,
            "--worker suspends everything on a worker",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "suspend --worker nobody",
            1,
            r"no worker has the id or name 'nobody'.*\(UNKNOWN_WORKER\)",
            marks=pytest.mark.long,
        ),
        pytest.param("remap one", 2, "either --pair OLD=NEW or --to", marks=pytest.mark.long),
        pytest.param(
            "remap one --pair alpha/0", 2, "'alpha/0' is not a pair: write OLD=NEW", marks=pytest.mark.long
        ),
        ("remap one --pair alpha/0=alpha/9", 2, "no GPU is at 'alpha/9'"),
        pytest.param(
            "remap one --pair alpha/0=alpha/x", 2, "write the slot as a number", marks=pytest.mark.long
        ),
        pytest.param(
            f"remap one --pair alpha/0={NOWHERE}",
            2,
            "no GPU has a UUID that begins with",
            marks=pytest.mark.long,
        ),
        pytest.param("remap one --pair alpha/0=GPU-", 2, "is a prefix of 2 UUIDs", marks=pytest.mark.long),
        pytest.param(
            "remap one --to alpha/0,alpha/1",
            2,
            "the list has 2 GPUs, and the workload holds 1",
            marks=pytest.mark.long,
        ),
        ("remap one --to alpha/1,alpha/1", 2, "names a GPU twice"),
        pytest.param("remap one --pair alpha/1=alpha/0", 1, "INVALID_ARGUMENT", marks=pytest.mark.long),
        pytest.param(
            "remap one --pair alpha/0=alpha/1 --pair alpha/0=alpha/1",
            1,
            "DUPLICATE_GPU",
            marks=pytest.mark.long,
        ),
        ("restore one --to alpha/1", 1, r"one is RUNNING: only one that is .*SUSPENDED.*\(WRONG_STATE\)"),
    ],
)
def test_refused(small_fleet: Fleet, arguments: str, code: int, match: str) -> None:
    small_fleet.refuse(*arguments.split(), code=code, match=match)
    assert small_fleet.leases() == {"alpha/0": "one"}
    small_fleet.wait_counting("one")


@pytest.fixture(scope="module")
def small_fleet(tmp_path_factory: pytest.TempPathFactory, is_mutual: bool) -> Iterator[Fleet]:
    """One fleet for all, since a refusal changes nothing: two GPUs, with a counter on the first."""
    with make_fleet(tmp_path_factory.mktemp("fleet"), is_mutual=is_mutual) as fleet:
        fleet.start_worker("alpha", gpus=2)
        fleet.run_counter("one")
        yield fleet


@pytest.mark.long
def test_a_fleet_of_two_chips(empty_fleet: Fleet) -> None:
    mixed = SimulatedHost.create(
        empty_fleet.folder / "mixed-host", gpus=2, chip=["H100", "L4"], timing=Timing.instant()
    )
    empty_fleet.hosts["mixed"] = mixed
    empty_fleet.start_worker("mixed")
    empty_fleet.run_counter("one", "mixed")
    empty_fleet.refuse("remap", "one", "--to", "mixed/1", code=1, match="INCOMPATIBLE_GPU")
    empty_fleet.wait_counting("one")


@pytest.mark.long
def test_a_busy_destination(fleet: Fleet) -> None:
    fleet.run_counter("one")
    fleet.run_counter("two")
    fleet.refuse("remap", "one", "--to", "alpha/1", code=1, match=r"is leased for workload.*\(NO_FREE_GPU\)")
    fleet.cli("suspend", "one")
    fleet.refuse("remap", "one", "--pair", "alpha/0=alpha/2", code=1, match="WRONG_STATE")
    fleet.refuse("restore", "one", "--to", "alpha/1", code=1, match="NO_FREE_GPU")
    fleet.wait(lambda: fleet.leases() == {"alpha/1": "two"})


@pytest.mark.long
def test_a_suspend_that_the_driver_refuses_says_what_became_of_each_member(fleet: Fleet) -> None:
    fleet.run_counter("one")
    root_pid = fleet.json("get", "workloads", "one")["status"]["root_pid"]
    fleet.hosts["alpha"].set_fault("checkpoint", root_pid, error=801, times=1)
    done = fleet.cli("suspend", "one", code=1)
    first, member = done.stderr.splitlines()
    assert "UNSUPPORTED_STATE" in first
    assert f"pid {root_pid}: RUNNING -> RUNNING, rolled back" in member
    fleet.wait_counting("one")


@pytest.mark.long
def test_no_coordinator() -> None:
    fleet = Fleet(Path(), address="127.0.0.1:1")
    refuse = partial(fleet.refuse, code=3, waits=True)
    with ThreadPoolExecutor() as at_once:  # each one waits for a coordinator
        read = at_once.submit(refuse, "get", "workers", match="no coordinator answers at 127.0.0.1:1")
        asked = at_once.submit(refuse, "suspend", "one", match="leasehold coordinator")
        read.result()
        asked.result()


@pytest.mark.long
def test_a_worker_out_of_contact(fleet: Fleet) -> None:
    fleet.run_counter("one")
    fleet.processes["alpha"].kill()
    fleet.wait(lambda: fleet.worker_state("alpha") != "WORKER_STATE_CONNECTED")
    stale = r"worker alpha is STALE.*\(WORKER_UNAVAILABLE\)"
    fleet.refuse("suspend", "one", code=1, match=stale, waits=True)
    root_pid = fleet.json("get", "workloads", "one")["status"]["root_pid"]
    os.kill(root_pid, signal.SIGKILL)


@pytest.mark.long
def test_usage_errors_have_code_2(empty_fleet: Fleet) -> None:
    for arguments in (
        ["get", "things"],
        ["run"],
        ["suspend"],
        ["nothing"],
        ["suspend", "--timeout", "0", "x"],
    ):
        assert empty_fleet.cli(*arguments, code=2).stderr


def test_an_unreadable_configuration(empty_fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "leasehold").mkdir()
    (tmp_path / "leasehold/cli.toml").write_text("coordinater = 'x'\n")
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    address = empty_fleet.address
    empty_fleet.address = ""
    done = empty_fleet.cli("get", "workers", code=2, **environment)
    empty_fleet.address = address
    assert "coordinater" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long
def test_a_port_in_use(empty_fleet: Fleet, tmp_path: Path) -> None:
    options = ["--listen", empty_fleet.address, "--database", str(tmp_path / "other.sqlite3")]
    done = empty_fleet.cli("coordinator", *options, code=2)
    assert "the port is in use" in done.stderr


@pytest.mark.long
def test_the_port_of_workers_is_told(empty_fleet: Fleet) -> None:
    done = empty_fleet.cli("get", "workers", "--coordinator", empty_fleet.worker_address, code=1)
    assert "UNIMPLEMENTED" in done.stderr
    assert "give the address that the coordinator serves clients at (--listen)" in done.stderr


@pytest.mark.long
def test_a_host_that_nobody_listens_on_keeps_the_worker_trying(tmp_path: Path) -> None:
    """With local tokens: the worker is started before there is a coordinator that could enrol it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    fleet = Fleet(tmp_path, worker_address=address)
    options = ["--coordinator", address, "--state-dir", str(tmp_path / "alpha"), "--name", "alpha"]
    fleet._start("alpha", "worker", *options)
    fleet.wait(lambda: "connecting again" in fleet.log("alpha"))
    fleet.start_coordinator()
    fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_CONNECTED")
    fleet.stop()
