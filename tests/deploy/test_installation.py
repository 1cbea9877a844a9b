"""Services that `leasehold install` makes, under a real systemd."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost, Timing

from tests.deploy.systemd_host import SystemdHost, drop_in, installed_files, needs_systemd, systemd_host
from tests.worker.conftest import COUNTER
from tests.worker.unix_users import is_readable, share

pytestmark = [
    needs_systemd,
    pytest.mark.skipif(not is_readable(), reason="other users can't read this checkout"),
]

LISTEN = ("--listen", "0.0.0.0:7400", "--worker-listen", "0.0.0.0:7401")
PYTHON = "/opt/leasehold/bin/python3"
DEADLINE_S = 60.0


@pytest.fixture
def host(tmp_path: Path) -> Iterator[SystemdHost]:
    with systemd_host(tmp_path) as started:
        yield started


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def main_pid(host: SystemdHost) -> int:
    return int(host.run("systemctl", "show", "--property=MainPID", "--value", "leasehold-worker"))


def counter_pid(host: SystemdHost) -> int:
    """The process of the counting workload, which runs."""
    found = json.loads(host.run("leasehold", "get", "workloads", "counter", "-o", "json"))
    assert found["status"]["state"] == "WORKLOAD_STATE_RUNNING"
    return int(found["status"]["root_pid"])


def is_counting(host: SystemdHost) -> bool:
    before = host.run("leasehold", "logs", "counter")
    time.sleep(0.1)
    return host.run("leasehold", "logs", "counter") != before


def wait_for_another(host: SystemdHost, pid: int) -> None:
    """Waits until systemd has started another worker, and the coordinator has it."""
    wait_for(lambda: main_pid(host) not in (0, pid), "systemd starts another worker")
    host.run("systemctl", "start", "leasehold-worker")  # returns once it serves
    wait_for(lambda: "CONNECTED" in host.run("leasehold", "get", "workers"), "the worker is connected")


def install_all(host: SystemdHost, tmp_path: Path) -> dict[str, str]:
    """Installs a coordinator and a worker, and runs a counting workload of the user alice.

    Returns:
        The environment in which programs find the GPUs of the host.
    """
    host.run("leasehold", "install", "coordinator", *LISTEN)
    assert host.run("leasehold", "whoami") == "local/root: admin\n"
    ticket = host.run("leasehold", "token", "create", "--worker", "gpu-01")
    gpus = share(SimulatedHost.create(tmp_path / "gpus", gpus=2, timing=Timing.instant()), tmp_path / "share")
    variables = "\n".join(f'Environment="{name}={value}"' for name, value in gpus.items())
    drop_in(host, "leasehold-worker.service", f"[Service]\n{variables}\nWatchdogSec=2\n")
    host.run("useradd", "--user-group", "alice")
    install = ("leasehold", "install", "worker", "--join-file", "-", "--run-as", "alice")
    host.run(*install, text=ticket, env=gpus)
    assert "gpu-01" in host.run("leasehold", "get", "workers")
    host.run("leasehold", "run", "--gpus", "1", "--name", "counter", "--", PYTHON, str(COUNTER))
    return gpus


@pytest.mark.long
def test_from_nothing_to_a_running_workload_and_back(host: SystemdHost, tmp_path: Path) -> None:
    before, users = installed_files(host), host.run("cat", "/etc/passwd", "/etc/group")
    gpus = install_all(host, tmp_path)
    pid = counter_pid(host)
    assert host.run("ps", "-o", "user=", str(pid)).strip() == "alice"
    refused = host.run("leasehold", "uninstall", "worker", "--purge", succeeds=False)
    assert "1 workloads of the worker have not ended, such as w-" in refused
    assert counter_pid(host) == pid
    host.run("systemctl", "stop", "leasehold-worker")
    refused = host.run("leasehold", "uninstall", "worker", "--purge", succeeds=False)
    assert "1 workloads of the worker have not ended, such as w-" in refused
    host.run("leasehold", "uninstall", "worker")
    refused = host.run("leasehold", "uninstall", "worker", "--purge", succeeds=False)
    assert "1 workloads of the worker have not ended, such as w-" in refused
    host.run("leasehold", "install", "worker", env=gpus)
    wait_for(lambda: "CONNECTED" in host.run("leasehold", "get", "workers"), "the worker is connected")
    assert counter_pid(host) == pid
    host.run("leasehold", "stop", "counter")
    host.run("leasehold", "uninstall", "worker", "--purge")
    host.run("leasehold", "uninstall", "coordinator", "--purge")
    host.run("sh", "-c", "userdel alice; rm -r /etc/systemd/system/leasehold-worker.service.d")
    assert installed_files(host) - before == set()
    assert host.run("cat", "/etc/passwd", "/etc/group") == users


@pytest.mark.long
def test_a_workload_outlives_its_worker_an_upgrade_and_new_settings(
    host: SystemdHost, tmp_path: Path
) -> None:
    gpus = install_all(host, tmp_path)
    pid = counter_pid(host)
    for end in (("systemctl", "restart", "leasehold-worker"), ("kill", "-KILL"), ("kill", "-STOP")):
        worker = main_pid(host)
        host.run(*end, *([str(worker)] if end[0] == "kill" else []))
        wait_for_another(host, worker)
        assert counter_pid(host) == pid
        wait_for(lambda: is_counting(host), "the workload counts on")
    host.run("sed", "-i", '1i labels = { rack = "r-17" }', "/etc/leasehold/worker.toml")
    host.run("systemctl", "restart", "leasehold-worker")
    wait_for(
        lambda: "r-17" in host.run("leasehold", "get", "workers", "-o", "json"), "the setting is in effect"
    )
    assert counter_pid(host) == pid
    wait_for(lambda: is_counting(host), "the workload counts on")
    host.run("leasehold", "suspend", "counter")
    host.run("leasehold", "install", "worker", env=gpus)  # such as after an upgrade
    host.run("leasehold", "restore", "counter")
    assert counter_pid(host) == pid
    host.run("leasehold", "stop", "counter")
