"""Hosts with a systemd each and without Leasehold. A bridge joins them, and they find each other by name."""

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.deploy.systemd_host import SystemdHost, systemd_host

BRIDGE: Final = "lh-deploy"
NET: Final = "10.173.92"
TURN_TIMEOUT_S: Final = 600
POLL_S: Final = 0.5


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, check=True)


@contextmanager
def _turn() -> Iterator[None]:
    """Waits until no other process has a network of hosts. The kernel frees the name when a process dies."""
    deadline = time.monotonic() + TURN_TIMEOUT_S
    with socket.socket(socket.AF_UNIX) as lock:
        while True:
            try:
                lock.bind(f"\0{BRIDGE}")
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)
        yield


@contextmanager
def joined_hosts(folder: Path, names: Sequence[str]) -> Iterator[dict[str, SystemdHost]]:
    """Hosts by their names while the block runs. Only one network of hosts can be up at once.

    Args:
        folder: A folder that this machine shares with the hosts.
        names: Their names.
    """
    with ExitStack() as stack:
        stack.enter_context(_turn())
        # Nobody else has a bridge now, so this one was left by a run that was killed.
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)
        _ip("link", "add", BRIDGE, "type", "bridge")
        stack.callback(_ip, "link", "del", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        hosts: dict[str, SystemdHost] = {}
        addresses = "".join(f"{NET}.{number} {name}\n" for number, name in enumerate(names, 1))
        for number, name in enumerate(names, 1):
            (folder / name).mkdir()
            host = hosts[name] = stack.enter_context(systemd_host(folder / name, name, has_program=False))
            end = f"lh-deploy-{number}"
            _ip("link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid()))
            _ip("link", "set", end, "master", BRIDGE, "up")
            host.run("ip", "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
            host.run("ip", "link", "set", "eth0", "up")
            host.run("tee", "-a", "/etc/hosts", text=addresses)
        yield hosts
