"""The command blocks of docs/operations.md, played by root's shell on joined hosts.

The hosts have no network besides the bridge and no SSH. Three things are replaced, all of them here:

* After ``python3 -m venv``, a ``.pth`` file names the packages of this test's environment, without Leasehold
  and pip. So each ``pip install --require-hashes`` is run, and finds the versions of its lock installed.
* ``requirements`` and ``dist`` in root's home are from :func:`release`, which builds the wheel of a checkout.
* ``scp`` leaves its file in a folder that the test shares with the host, and the test delivers the file.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.deploy.systemd_host import SystemdHost

PAGE: Final = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text()
DEADLINE_S: Final = 90.0

PACKAGES: Final = "/srv/packages"
PROVIDE_PACKAGES: Final = f"""
mkdir {PACKAGES}
ln -s "$0"/* {PACKAGES}
cd {PACKAGES}
rm -rf -- *leasehold* pip pip-* setuptools* *.pth
"""

MAKE_ENVIRONMENT: Final = "python3 -m venv /opt/leasehold"
NAME_PACKAGES: Final = f"echo {PACKAGES} >$(echo /opt/leasehold/lib/python3*/site-packages)/packages.pth"
PREPARATION: Final = """
set -euo pipefail
cd /root
export PIP_NO_INDEX=1 PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
scp() {{ (umask 077 && install -D "$1" "{outbox}/${{2%:}}/$1"); }}
"""


class Block(NamedTuple):
    """A block of commands.

    Attributes:
        names: The hosts on which it runs.
        script: Its lines.
    """

    names: tuple[str, ...]
    script: str


def section(title: str) -> list[Block]:
    """The blocks of a section."""
    _, _, found = PAGE.partition(f"\n## {title}\n")
    text = found.partition("\n## ")[0]
    blocks = re.findall(r"^```\n# on (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE)
    return [
        Block(tuple(re.findall(r"head|gpu-\d+", where.partition("once")[0])), script)
        for where, script in blocks
    ]


def provide_packages(hosts: Mapping[str, SystemdHost]) -> None:
    """Gives each host the packages of this test's environment."""
    for host in hosts.values():
        host.run("bash", "-euc", PROVIDE_PACKAGES, sysconfig.get_path("purelib"))


def release(checkout: Path, folder: Path) -> Path:
    """Builds what an operator brings to a host: the locks and the wheel of a checkout."""
    shutil.copytree(checkout / "requirements", folder / "requirements")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        cwd=checkout,
        check=True,
        capture_output=True,
    )
    return folder


def bring(brought: Path, host: SystemdHost) -> None:
    """Puts a release in root's home, in place of an earlier one."""
    shutil.copytree(brought, host.folder / "release")
    host.run("bash", "-euc", 'cd && rm -rf requirements dist && mv "$0"/* .', str(host.folder / "release"))
    shutil.rmtree(host.folder / "release")


def play(hosts: Mapping[str, SystemdHost], block: Block, *, succeeds: bool = True) -> str:
    """Runs a block on each of its hosts, and returns the output of the last one.

    A step of a chain (``&&``) that fails ends the block, as a reader would.
    """
    shown = ""
    for name in block.names:
        outbox = hosts[name].folder / "outbox"
        script = re.sub(r"(?m)^(.*&&\n(?:  .*&&\n)*  .*)$", r"\1 || exit", block.script)
        script = script.replace(MAKE_ENVIRONMENT, f"{MAKE_ENVIRONMENT}\n{NAME_PACKAGES}")
        preparation = PREPARATION.format(outbox=shlex.quote(str(outbox)))
        shown = hosts[name].run("bash", "-c", preparation + script, succeeds=succeeds)
        for file in outbox.glob("*/*"):
            hosts[file.parent.name].run("tee", f"/root/{file.name}", text=file.read_text())
            file.unlink()
    return shown


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def connected(head: SystemdHost) -> int:
    """The number of connected workers."""
    return len(re.findall(r"^gpu-0\d .*CONNECTED", head.run("leasehold", "get", "workers"), re.MULTILINE))


def pids(head: SystemdHost) -> dict[str, int]:
    """The first process of each running workload, by name."""
    found = json.loads(head.run("leasehold", "get", "workloads", "-o", "json"))["workloads"]
    return {
        one["name"]: one["status"]["root_pid"]
        for one in found
        if one["status"]["state"] == "WORKLOAD_STATE_RUNNING"
    }
