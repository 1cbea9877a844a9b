"""A fleet of which each process has a network namespace of its own, joined by a bridge."""

import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from .fleet import ChaosFleet

PREFIX: Final = "leasehold"
NET: Final = "10.173.91"
HOSTS: Final = {"coordinator": 1, "alpha": 2, "beta": 3}
PORT: Final = 7400


def ip(*arguments: str, check: bool = True) -> None:
    """Runs ``ip``."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def inside(name: str) -> list[str]:
    """What makes a command run in the namespace of a process."""
    return ["ip", "netns", "exec", f"{PREFIX}-{name}"]


def make() -> None:
    """Makes the bridge in our own namespace, and a namespace for each process."""
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


def unmake() -> None:
    """Takes all of it away."""
    for name, number in HOSTS.items():
        ip("link", "del", f"lh-{number}", check=False)
        ip("netns", "del", f"{PREFIX}-{name}", check=False)
    ip("link", "del", f"{PREFIX}0", check=False)


@contextmanager
def separated_fleet(folder: Path) -> Iterator[ChaosFleet]:
    """A fleet whose processes reach each other over the bridge only."""
    unmake()
    make()
    fleet = ChaosFleet(folder, f"{NET}.{HOSTS['coordinator']}:{PORT}")
    try:
        fleet.prefix = {name: inside(name) for name in HOSTS}
        fleet.heal()
        yield fleet
    finally:
        fleet.stop()
        unmake()


def partition(_: ChaosFleet, choose: random.Random) -> None:
    """Cuts one worker off: its link is down, or packets vanish one way, and come through again later."""
    name = choose.choice(["alpha", "beta"])
    duration_s = choose.uniform(0.5, 8)
    match choose.choice(["link", "down", "up"]):
        case "link":
            ip("link", "set", f"lh-{HOSTS[name]}", "down")
            time.sleep(duration_s)
            ip("link", "set", f"lh-{HOSTS[name]}", "up")
        case "down":  # the worker hears nothing, and is heard
            _black_hole("coordinator", name, duration_s)
        case _:
            _black_hole(name, "coordinator", duration_s)


def _black_hole(sender: str, receiver: str, duration_s: float) -> None:
    route = ["blackhole", f"{NET}.{HOSTS[receiver]}/32"]
    ip("-n", f"{PREFIX}-{sender}", "route", "add", *route)
    time.sleep(duration_s)
    ip("-n", f"{PREFIX}-{sender}", "route", "del", *route)
