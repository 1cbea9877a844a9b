"""docs/operations.md: its commands alone set up three hosts, mend each loss, and remove all again."""

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from tests.deploy.host_network import joined_hosts
from tests.deploy.systemd_host import SystemdHost, drop_in, installed_files, needs_systemd
from tests.worker.unix_users import is_readable, share

pytestmark = [
    pytest.mark.long,
    needs_systemd,
    pytest.mark.skipif(not is_readable(), reason="other users can't read this checkout"),
]

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
NAMES = ("head", "gpu-01", "gpu-02")
GPU_HOSTS = NAMES[1:]
WITHOUT_NETWORK = ("/opt/leasehold/bin/pip ", "python3 -m venv ")
"""Begins of commands that need a package index: the hosts have the checkout's, and .ci/extras runs these."""

DEADLINE_S = 90.0


def section(title: str) -> list[tuple[list[str], list[str]]]:
    """The blocks of a section: the hosts on which each runs, and its lines."""
    _, _, found = PAGE.partition(f"\n## {title}\n")
    text = found.partition("\n## ")[0]
    blocks = re.findall(r"^```\n# on (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    return [
        (re.findall(r"head|gpu-\d+", where.partition("once")[0]), body.splitlines()) for where, body in blocks
    ]


def play(hosts: dict[str, SystemdHost], block: tuple[list[str], list[str]]) -> None:
    """Runs a block on each of its hosts, as root's shell does."""
    names, lines = block
    for name in names:
        script = ["cd /root"]
        for line in [*lines, "scp"]:
            if line.startswith("scp"):
                hosts[name].run("bash", "-euo", "pipefail", "-c", "\n".join(script))
                script = ["cd /root"]
                if arguments := shlex.split(line)[1:]:
                    file, target = arguments
                    text = hosts[name].run("cat", f"/root/{file}")
                    hosts[target.removesuffix(":")].run("tee", f"/root/{file}", text=text)
            elif not line.startswith(WITHOUT_NETWORK):
                script.append(line)


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def connected(head: SystemdHost) -> int:
    """Number of workers that the coordinator has."""
    return len(re.findall(r"^gpu-0\d .*CONNECTED", head.run("leasehold", "get", "workers"), re.MULTILINE))


def pids(head: SystemdHost) -> dict[str, int]:
    """The first process of each running workload, by name."""
    found = json.loads(head.run("leasehold", "get", "workloads", "-o", "json"))["workloads"]
    return {
        one["name"]: one["status"]["root_pid"]
        for one in found
        if one["status"]["state"] == "WORKLOAD_STATE_RUNNING"
    }


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, SystemdHost]]:
    with joined_hosts(tmp_path, NAMES) as started:
        for name in GPU_HOSTS:
            gpus = SimulatedHost.create(tmp_path / f"{name}-gpus", gpus=2, timing=Timing.instant())
            variables = share(gpus, started[name].folder / "share")
            lines = "\n".join(f'Environment="{key}={value}"' for key, value in variables.items())
            drop_in(started[name], "leasehold-worker.service", f"[Service]\n{lines}\n")
        yield started


def test_the_commands_of_the_page(hosts: dict[str, SystemdHost]) -> None:
    head, gpu_01 = hosts["head"], hosts["gpu-01"]
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
