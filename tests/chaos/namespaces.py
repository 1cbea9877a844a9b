"""A fleet of which each process has a network namespace of its own, joined by a bridge."""

import errno
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold_client.config import credentials_directory
from leasehold_coordinator.storage.rows import binding_row

from tests.certificates import enrol, write_rows
from tests.worker.unix_users import ALICE_UID, open_to_others, share

from .fleet import CHANNEL_OPTIONS, WORKERS, ChaosFleet

PREFIX: Final = "leasehold"
NET: Final = "10.173.91"
HOSTS: Final = {"coordinator": 1, "alpha": 2, "beta": 3, "gamma": 4, "laptop": 5}
PORT: Final = 7400
WORKER_PORT: Final = 7401


def ip(*arguments: str, check: bool = True) -> None:
    """Runs ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def inside(name: str) -> list[str]:
    """What makes a command run in the namespace of a process."""
    return ["ip", "netns", "exec", f"{PREFIX}-{name}"]


@contextmanager
def namespaces() -> Iterator[None]:
    """A bridge in our own namespace, and a namespace for each process; one at a time in our namespace."""
    with socket.socket(socket.AF_UNIX) as lock:
        while not _is_bound(lock):
            time.sleep(0.2)
        _unmake()
        try:
            _make()
            yield
        finally:
            _unmake()


def _is_bound(lock: socket.socket) -> bool:
    """Whether our socket has the abstract name: a network namespace has it once, also for several chroots."""
    try:
        lock.bind(f"\0{PREFIX}-test-namespaces")
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    return True


def _make() -> None:
    ip("link", "add", f"{PREFIX}0", "type", "bridge")
    ip("addr", "add", f"{NET}.254/24", "dev", f"{PREFIX}0")
    ip("link", "set", f"{PREFIX}0", "up")
    for name, number in HOSTS.items():
        ip("netns", "add", f"{PREFIX}-{name}")
        ip("link", "add", f"lh-{number}", "type", "veth", "peer", "name", "eth0", "netns", f"{PREFIX}-{name}")
        ip("link", "set", f"lh-{number}", "master", f"{PREFIX}0", "up")
        ip("-n", f"{PREFIX}-{name}", "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
        ip("-n", f"{PREFIX}-{name}", "link", "set", "eth0", "up")
        ip("-n", f"{PREFIX}-{name}", "link", "set", "lo", "up")


def _unmake() -> None:
    for name, number in HOSTS.items():
        ip("link", "del", f"lh-{number}", check=False)
        ip("netns", "del", f"{PREFIX}-{name}", check=False)
    ip("link", "del", f"{PREFIX}0", check=False)


@contextmanager
def separated_fleet(folder: Path) -> Iterator[ChaosFleet]:
    """A fleet whose processes reach each other over the bridge only."""
    with namespaces():
        host = f"{NET}.{HOSTS['coordinator']}"
        fleet = ChaosFleet(folder, f"{host}:{PORT}", f"{host}:{WORKER_PORT}")
        try:
            fleet.prefix = {name: inside(name) for name in HOSTS}
            _give_unix_user(fleet)
            _enrol(fleet)
            _lift_bounds(fleet)
            fleet.heal()
            yield fleet
        finally:
            fleet.stop()


def _give_unix_user(fleet: ChaosFleet) -> None:
    """Lets the workers run programs for a coordinator of another host: never as root."""
    settings = fleet.folder / "worker.toml"
    settings.write_text(f'run_as = "{ALICE_UID}:{ALICE_UID}"\n')
    fleet.worker_options = ["--config", str(settings)]
    open_to_others(fleet.folder)
    fleet.worker_variables = {
        name: share(host, fleet.folder / f"{name}-files") for name, host in fleet.hosts.items()
    }


def _lift_bounds(fleet: ChaosFleet) -> None:
    """Lets this process send more requests than one user of another host may."""
    settings = fleet.folder / "coordinator.toml"
    settings.write_text("caller_requests_per_s = 100_000.0\ncaller_commands = 100_000\n")
    fleet.coordinator_options = ["--config", str(settings)]


def _enrol(fleet: ChaosFleet) -> None:
    """Gives each worker, and this process, a client certificate, which is required off loopback."""
    names = [f"worker/{name}" for name in WORKERS]
    client, *workers = enrol(fleet.database, credentials_directory(), "user/chaos", *names)
    write_rows(
        fleet.database,
        binding_row(RoleBinding(identity="user/chaos", role=access_service_pb2.ROLE_OPERATOR)),
    )
    for name, holder in zip(WORKERS, workers, strict=True):
        fleet.credentials[name] = fleet.folder / f"{name}-credentials"
        holder.write(fleet.credentials[name], "worker")
    fleet.channel.close()
    fleet.use_channel(client.open_channel(fleet.address, CHANNEL_OPTIONS))


def partition(_: ChaosFleet, choose: random.Random) -> None:
    """Cuts one worker off for a while: its link is down, or packets vanish one way."""
    name = choose.choice(["alpha", "beta"])
    duration_s = choose.uniform(0.5, 8)
    sender, receiver = choose.choice([("coordinator", name), (name, "coordinator")])
    with choose.choice(ways())(sender, receiver):
        time.sleep(duration_s)


def ways() -> list[Callable[[str, str], AbstractContextManager[None]]]:
    """The ways to keep what one process sends from another, as far as this host has the programs."""
    return [link_down, blackhole, *([drop] if shutil.which("iptables") else [])]


@contextmanager
def link_down(sender: str, receiver: str) -> Iterator[None]:
    """The worker hears nobody, and nobody hears it."""
    worker = receiver if sender == "coordinator" else sender
    ip("link", "set", f"lh-{HOSTS[worker]}", "down")
    yield
    ip("link", "set", f"lh-{HOSTS[worker]}", "up")


@contextmanager
def blackhole(sender: str, receiver: str) -> Iterator[None]:
    """What is sent vanishes: the sender has no route."""
    route = ["blackhole", f"{NET}.{HOSTS[receiver]}/32"]
    ip("-n", f"{PREFIX}-{sender}", "route", "add", *route)
    yield
    ip("-n", f"{PREFIX}-{sender}", "route", "del", *route)


@contextmanager
def drop(sender: str, receiver: str) -> Iterator[None]:
    """What arrives vanishes, which its sender can't tell from a slow peer."""
    rule = ["INPUT", "--source", f"{NET}.{HOSTS[sender]}", "--jump", "DROP"]
    _iptables(receiver, "--append", *rule)
    yield
    _iptables(receiver, "--delete", *rule)


def _iptables(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [*inside(name), "iptables", "--wait", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"iptables {' '.join(arguments)}: {done.stderr.strip()}")
