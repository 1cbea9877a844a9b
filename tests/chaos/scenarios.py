"""What goes wrong, by name. Each scenario lasts a while, during which clients go on asking."""

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from typing import Final, TypeAlias

from leasehold_coordinator import crash_points as coordinator_points
from leasehold_worker import crash_points as worker_points

from tests.worker.unix_users import is_readable

from .fleet import WORKERS, ChaosFleet
from .proxy import Proxy

Trouble: TypeAlias = Callable[[ChaosFleet, random.Random], None]

CRASH_TIMEOUT_S: Final = 25.0
"""How long a process may take to come to its crash point. One that does not is killed."""

NEEDS_A_WORKLOAD: Final = frozenset(
    {"leases-rebuilt", "workload-probed", "command-settled", "phase-rollback"}
)
"""Points that a worker comes to only where it has had one."""


def crash_at(name: str, point: str, reached: set[str]) -> Trouble:
    """Restarts a process with a crash point armed, and again once it has died there."""

    def trouble(fleet: ChaosFleet, _: random.Random) -> None:
        if point in NEEDS_A_WORKLOAD:
            _wait(lambda: bool(_counters(fleet, name)))
        if point == "command-settled":
            _die_at(fleet, name, "phase-checkpoint")
        if _die_at(fleet, name, point):
            reached.add(point)
        fleet.start(name)

    return trouble


def _die_at(fleet: ChaosFleet, name: str, point: str) -> bool:
    """Starts a process anew with a crash point armed, and waits for its death there."""
    if fleet.is_alive(name):
        fleet.kill(name)
    fleet.start(name, point)

    def is_dead() -> bool:
        if point == "phase-rollback":
            for pid in _counters(fleet, name):
                fleet.hosts[name].clear_faults(pid=pid)
                fleet.hosts[name].set_fault("checkpoint", pid, error=801, times=1)
        return not fleet.is_alive(name)

    if _wait(is_dead):
        return True
    fleet.kill(name)
    return False


def _wait(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + CRASH_TIMEOUT_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def _counters(fleet: ChaosFleet, name: str) -> list[int]:
    """Processes of workloads that are on GPUs of a worker."""
    return [process.pid for process in fleet.hosts[name].processes() if process.gpu_bytes]


def kill_anybody(fleet: ChaosFleet, choose: random.Random) -> None:
    """kill -9 of one, two or all at a random time."""
    time.sleep(choose.uniform(0, 0.5))
    chosen = choose.sample(fleet.everybody, choose.randint(1, 3))
    for name in chosen:
        if fleet.is_alive(name):
            fleet.kill(name)
    time.sleep(choose.uniform(0, 0.5))
    for name in chosen:
        fleet.start(name)


def freeze_somebody(fleet: ChaosFleet, choose: random.Random) -> None:
    """SIGSTOP, and later SIGCONT."""
    name = choose.choice(fleet.everybody)
    fleet.send_signal(name, signal.SIGSTOP)
    time.sleep(choose.uniform(0.2, 4))
    fleet.send_signal(name, signal.SIGCONT)


def restart_both_sides(fleet: ChaosFleet, choose: random.Random) -> None:
    """Coordinator and workers end in order, and come back."""
    time.sleep(choose.uniform(0, 0.5))
    for name in fleet.everybody:
        fleet.send_signal(name, signal.SIGTERM)
    for name in fleet.everybody:
        fleet.processes[name].wait(90)
        fleet.start(name)


def bad_network(fleet: ChaosFleet, choose: random.Random) -> None:
    """Delay, then cuts, then nothing at all, between one worker and the coordinator."""
    name = choose.choice(WORKERS)
    proxy = Proxy(fleet.session_address)
    try:
        fleet.kill(name)
        fleet.worker_address[name] = proxy.address
        fleet.start(name)
        proxy.delay_s = choose.uniform(0, 0.05)
        time.sleep(choose.uniform(0.5, 1.5))
        for _ in range(3):
            proxy.cut()
            time.sleep(choose.uniform(0, 0.3))
        proxy.refusing = True
        proxy.cut()
        time.sleep(choose.uniform(0.2, 2))
        proxy.refusing = False
        time.sleep(0.5)
    finally:
        fleet.kill(name)
        proxy.stop()
        fleet.worker_address[name] = fleet.session_address
        fleet.start(name)


def crash_points() -> list[tuple[str, str]]:
    """Every crash point, with who is to die there."""
    return [
        *(("alpha", point) for point in worker_points.CRASH_POINTS),
        *(("coordinator", point) for point in coordinator_points.CRASH_POINTS),
    ]


TROUBLES: Final[dict[str, Trouble]] = {
    "kill": kill_anybody,
    "freeze": freeze_somebody,
    "restart": restart_both_sides,
    "network": bad_network,
}
"""The scenarios that any fleet can have."""


@cache
def why_no_namespaces() -> str:
    """Why network namespaces can't be made here. Empty: they can."""
    if shutil.which("ip") is None:
        return "there is no ip command"
    probe = f"leasehold-probe-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return f"network namespaces can't be made: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=False)
    if not is_readable():  # a worker never runs programs of another host's coordinator as root
        return "other users can't read this checkout and its interpreter"
    return ""
