"""docs/operations.md: its commands alone set up, upgrade and mend three hosts, and remove all again."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from leasehold_client.demo.counts import CounterReport, read_counter
from leasehold_simgpu import SimulatedHost, Timing

from tests.deploy.host_network import joined_hosts
from tests.deploy.operations_page import (
    Block,
    bring,
    connected,
    pids,
    play,
    provide_packages,
    release,
    section,
    wait_for,
)
from tests.deploy.systemd_host import SystemdHost, drop_in, installed_files, needs_systemd
from tests.older_release import ROOT, needs_older_release, unpack_older
from tests.worker.conftest import COUNTER
from tests.worker.unix_users import is_readable, share

pytestmark = [
    pytest.mark.long,
    needs_systemd,
    pytest.mark.skipif(not is_readable(), reason="other users can't read this checkout"),
]

NAMES = ("head", "gpu-01", "gpu-02")
GPU_HOSTS = NAMES[1:]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, SystemdHost]]:
    with joined_hosts(tmp_path, NAMES) as started:
        provide_packages(started)
        for name in GPU_HOSTS:
            gpus = SimulatedHost.create(tmp_path / f"{name}-gpus", gpus=3, timing=Timing.instant())
            variables = share(gpus, started[name].folder / "share")
            lines = "\n".join(f'Environment="{key}={value}"' for key, value in variables.items())
            drop_in(started[name], "leasehold-worker.service", f"[Service]\n{lines}\n")
        yield started


@pytest.mark.minutes
def test_the_commands_of_the_page(hosts: dict[str, SystemdHost], tmp_path: Path) -> None:
    head, gpu_01 = hosts["head"], hosts["gpu-01"]
    brought = release(ROOT, tmp_path / "release")
    for host in hosts.values():
        bring(brought, host)
    before_all = {name: installed_files(host) for name, host in hosts.items()}
    for block in section("Three hosts from nothing"):
        play(hosts, block)
    wait_for(lambda: connected(head) == len(GPU_HOSTS), "both workers are connected")
    assert list(pids(head)) == ["first"]

    nightly, restoring, last = section("Backups")
    play(hosts, nightly)
    gpu_01.run(
        "leasehold", "run", "--worker", "gpu-02", "--gpus", "1", "--name", "second", "--", "sleep", "1000"
    )
    before = pids(head)
    assert set(before) == {"first", "second"}

    head.run("systemctl", "kill", "--signal=KILL", "leasehold-coordinator")
    head.run("rm", "-r", "/var/lib/leasehold/coordinator", "/etc/leasehold/coordinator.toml")
    play(hosts, restoring)
    wait_for(lambda: connected(head) == len(GPU_HOSTS), "both workers are back")
    play(hosts, last)
    wait_for(lambda: connected(head) == len(GPU_HOSTS), "both workers are back")
    assert pids(head) == before
    owners = [
        json.loads(head.run("leasehold", "get", "workloads", name, "-o", "json"))["owner"] for name in before
    ]
    assert set(owners) == {"user/alice", "host/gpu-02/alice"}

    token, join, rotate, forget = section("Certificates")
    for block in (token, join, rotate):
        play(hosts, block)
    wait_for(lambda: connected(head) == len(GPU_HOSTS), "gpu-02 is back with another certificate")
    play(hosts, forget)
    for block in (token, join):
        play(hosts, block)
    wait_for(lambda: connected(head) == 1, "gpu-02 is back with a certificate of another authority")
    head.run("leasehold", "stop", "second")
    hosts["gpu-02"].run("systemctl", "stop", "leasehold-worker")
    (lost,) = section("A host is lost")
    play(hosts, lost)
    assert "gpu-02" not in head.run("leasehold", "get", "workers")

    gpu_01.run("kill", str(before["first"]))
    for block in section("Install"):
        play(hosts, block)
    for name in NAMES:
        assert installed_files(hosts[name]) <= before_all[name]


LOAD = "while :; do leasehold suspend busy && leasehold restore busy || sleep 1; done"
COUNTERS = ("one", "two")
ENDED = {"SUCCEEDED", "FAILED", "REJECTED", "CANCELLED", "EXPIRED"}


def report(head: SystemdHost, name: str) -> CounterReport:
    return read_counter(head.run("leasehold", "logs", name))


def counts_on(head: SystemdHost, name: str, before: int) -> bool:
    return report(head, name).counts > before + 2


def use(head: SystemdHost) -> None:
    """Suspends, restores and exchanges GPUs. No counter loses a count or finds a wrong byte."""
    before = {name: report(head, name).counts for name in COUNTERS}
    head.run("leasehold", "suspend", "one")
    head.run("leasehold", "restore", "one")
    head.run("leasehold", "remap", "--swap", *COUNTERS)
    for name in COUNTERS:
        wait_for(partial(counts_on, head, name, before[name]), f"{name} counts on")
        assert (report(head, name).lost, report(head, name).corrupt) == (0, 0)


def upgrade_under_load(hosts: dict[str, SystemdHost], block: Block) -> None:
    """Plays a block while commands are sent."""
    head = hosts["head"]
    head.run("systemd-run", "--quiet", "--unit=load", "--setenv=HOME=/root", "bash", "-c", LOAD)
    wait_for_commands(head)
    play(hosts, block)
    wait_for(lambda: connected(head) == len(GPU_HOSTS), "both workers are connected")
    wait_for_commands(head)
    head.run("systemctl", "stop", "load")


def wait_for_commands(head: SystemdHost) -> None:
    """Waits until further commands have succeeded."""
    before = set(commands(head, "state = SUCCEEDED"))
    wait_for(lambda: len(set(commands(head, "state = SUCCEEDED")) - before) > 1, "commands succeed")


def commands(head: SystemdHost, expression: str) -> dict[str, str]:
    """The states of the newest 100 commands that match, by id."""
    found = json.loads(head.run("leasehold", "get", "commands", "--filter", expression, "-o", "json"))[
        "commands"
    ]
    return {one["command_id"]: one["state"].removeprefix("COMMAND_STATE_") for one in found}


@pytest.mark.minutes
@needs_older_release
def test_upgrades_while_counters_run(hosts: dict[str, SystemdHost], tmp_path: Path) -> None:
    head, gpu_01 = hosts["head"], hosts["gpu-01"]
    older = release(unpack_older(tmp_path / "checkout"), tmp_path / "older")
    newer = release(ROOT, tmp_path / "newer")
    for host in hosts.values():
        bring(older, host)
    for block in section("Three hosts from nothing"):
        play(hosts, block)
    wait_for(lambda: connected(head) == len(GPU_HOSTS), "both workers are connected")
    counter = [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.05"]
    for name, worker in (*((name, "gpu-01") for name in COUNTERS), ("busy", "gpu-02")):
        gpu_01.run("leasehold", "run", "--worker", worker, "--gpus", "1", "--name", name, "--", *counter)
    before = pids(head)
    assert set(before) == {"first", *COUNTERS, "busy"}
    use(head)

    on_gpu_hosts, on_head = section("Upgrades")
    first, second = (Block((name,), on_gpu_hosts.script) for name in on_gpu_hosts.names)
    for block in (first, on_head, second):
        (name,) = block.names
        assert not is_newer(hosts[name])
        bring(newer, hosts[name])
        upgrade_under_load(hosts, block)
        assert is_newer(hosts[name])
        use(head)
    head.run("test", "-e", "/var/lib/leasehold/coordinator/coordinator.sqlite3-tables-0014")

    bring(older, head)
    refusal = play(hosts, on_head, succeeds=False)
    assert "coordinator.sqlite3 can't be used" in refusal
    bring(newer, head)
    play(hosts, on_head)
    wait_for(lambda: connected(head) == len(GPU_HOSTS), "both workers are back")
    use(head)
    wait_for(lambda: set(commands(head, "NOT state = SUCCEEDED").values()) <= ENDED, "each command has ended")
    head.run("leasehold", "restore", "busy")
    assert pids(head) == before
    assert (report(head, "busy").lost, report(head, "busy").corrupt) == (0, 0)


def is_newer(host: SystemdHost) -> bool:
    """Whether the program of a host is of the present release."""
    return "--host" in host.run("leasehold", "doctor", "--help")
