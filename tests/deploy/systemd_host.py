"""A host with a systemd of its own, in namespaces: a copy-on-write copy of this machine without network."""

import os
import shutil
import subprocess
import sysconfig
import textwrap
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.worker.unix_users import open_to_others

ROOT: Final = Path(__file__).resolve().parents[2]
SYSTEMD: Final = Path("/lib/systemd/systemd")
CGROUPS: Final = Path("/sys/fs/cgroup")
DEADLINE_S: Final = 180.0
FOLDERS: Final = ("/etc", "/usr", "/var/lib", "/opt", "/run/leasehold")

ENVIRONMENT: Final = {
    "PATH": "/opt/leasehold/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}

INSTALL: Final = r"""
import sys, sysconfig
from pathlib import Path

packages = Path(sysconfig.get_path("purelib"), "checkout.pth")
packages.write_text(f"import site; site.addsitedir({sys.argv[1]!r})")
program = Path(sysconfig.get_path("scripts"), "leasehold")
program.write_text(f"#!{sys.executable}\nfrom leasehold_client.__main__ import main\nmain()\n")
program.chmod(0o755)
"""
"""A program in a virtual environment with the packages of another one."""

BOOT: Final = """
set -eu
folder=$1 checkout=$2 host=$3
ip link set lo up
mkdir "$folder/layers"
mount -t tmpfs tmpfs "$folder/layers"
mkdir "$folder/layers/upper" "$folder/layers/work" "$folder/layers/root"
root=$folder/layers/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/layers/upper,workdir=$folder/layers/work" "$root"
mount --rbind "$checkout" "$root$checkout"
mount --bind "$folder" "$root$folder"
cd "$root"
mount -t proc proc proc
mount -t sysfs -o ro sysfs sys
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
for name in null zero full random urandom tty; do
    touch "dev/$name"
    mount --bind "/dev/$name" "dev/$name"
done
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
touch dev/console
mount --bind "$folder/console" dev/console
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup2 sys/fs/cgroup
else
    mount -t tmpfs tmpfs sys/fs/cgroup
    mkdir sys/fs/cgroup/unified sys/fs/cgroup/systemd
    mount -t cgroup2 cgroup2 sys/fs/cgroup/unified
    mount -t cgroup -o none,name=systemd systemd sys/fs/cgroup/systemd
fi
mkdir -p machine etc/tmpfiles.d
echo "$host" >etc/hostname # systemd sets it
echo "127.0.1.1 $host" >>etc/hosts
: > etc/tmpfiles.d/tmp.conf # the folder that is shared lies in /tmp
pivot_root . machine
umount -l machine
export container=leasehold
exec /lib/systemd/systemd --system --log-target=console --unit=basic.target
"""


def _hierarchies() -> list[Path]:
    """Where systemd has its control groups: the second version, or a mixed layout."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [CGROUPS / "systemd", CGROUPS / "unified"]


needs_systemd = pytest.mark.skipif(
    os.geteuid() != 0
    or not SYSTEMD.exists()
    or shutil.which("nsenter") is None
    or not all(folder.is_dir() for folder in _hierarchies()),
    reason="only root can start a systemd of its own, and it needs systemd and control groups",
)


class SystemdHost:
    """The host while it runs.

    Attributes:
        name: The name of the host.
        folder: A folder that this machine and the host share.
        console: What its systemd says.
    """

    def __init__(self, folder: Path, name: str, *, has_program: bool) -> None:
        self.name = name
        self.folder = folder
        self.console = folder / "console"
        self._has_program = has_program
        self._group = f"leasehold-test-{uuid.uuid4().hex[:8]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Boots, and waits until systemd takes commands."""
        open_to_others(self.folder)
        self.console.touch()
        groups = [folder / self._group for folder in _hierarchies()]
        for group in groups:
            group.mkdir()
        enter = "; ".join(f"echo $$ > {group}/cgroup.procs" for group in groups)
        unshare = "unshare --mount --pid --fork --kill-child --uts --ipc --net --cgroup"
        with self.console.open("wb") as console:
            self._process = subprocess.Popen(
                [
                    "bash",
                    "-c",
                    f'{enter}; exec {unshare} bash -c "$0" boot "$@"',
                    BOOT,
                    self.folder,
                    ROOT,
                    self.name,
                ],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=ENVIRONMENT,
            )
        deadline = time.monotonic() + DEADLINE_S
        while not self._is_up():
            assert self._process.poll() is None, self.console.read_text()
            assert time.monotonic() < deadline, self.console.read_text()
            time.sleep(0.1)
        if self._has_program:
            self.run("python3", "-m", "venv", "--without-pip", "/opt/leasehold")
            packages = sysconfig.get_path("purelib")
            self.run("/opt/leasehold/bin/python3", "-c", INSTALL, packages)
        if ROOT.is_relative_to("/tmp"):  # PrivateTmp of the unit hides the checkout from the coordinator
            drop_in(
                self, "leasehold-coordinator.service", f"[Service]\nBindReadOnlyPaths={ROOT}\n", "checkout"
            )

    def run(
        self, *command: str, text: str | None = None, succeeds: bool = True, env: dict[str, str] | None = None
    ) -> str:
        """What a command of the host's root prints, to both of its streams."""
        clean = {**ENVIRONMENT, **(env or {})}
        done = subprocess.run(
            [*self._enter(), "env", "-i", *(f"{name}={value}" for name, value in clean.items()), *command],
            input=text,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (done.returncode == 0) == succeeds, f"{command}: {done.stdout}\n{self._journal()}"
        return done.stdout

    def stop(self) -> None:
        """Ends the host and all that runs in it."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        for hierarchy in _hierarchies():
            for folder, _, _ in os.walk(hierarchy / self._group, topdown=False):
                _remove_group(Path(folder))

    def _journal(self) -> str:
        if self.pid() is None:
            return ""
        command = [*self._enter(), "journalctl", "--no-pager", "--lines", "60", "--output", "short-monotonic"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    def _enter(self) -> list[str]:
        pid = self.pid()
        assert pid is not None, self.console.read_text()
        return [
            "nsenter",
            f"--target={pid}",
            *["--mount", "--pid", "--uts", "--ipc", "--net", "--cgroup", "--root", "--wd", "--"],
        ]

    def pid(self) -> int | None:
        """The pid of the host's systemd on this machine."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        try:
            return int(children.read_text().split()[0])
        except (OSError, IndexError):
            return None

    def _is_up(self) -> bool:
        if (pid := self.pid()) is None or os.readlink(f"/proc/{pid}/exe") != os.path.realpath(SYSTEMD):
            return False
        asked = subprocess.run(
            [*self._enter(), "systemctl", "is-active", "basic.target"], capture_output=True, check=False
        )
        return asked.stdout == b"active\n"


def _remove_group(folder: Path) -> None:
    """Removes a control group, once its processes have been reaped."""
    deadline = time.monotonic() + DEADLINE_S
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            assert time.monotonic() < deadline, folder
            time.sleep(0.05)


@contextmanager
def systemd_host(folder: Path, name: str = "gpu-01", *, has_program: bool = True) -> Iterator[SystemdHost]:
    """A host while the block runs.

    Args:
        folder: A folder that this machine and the host share.
        name: The name of the host.
        has_program: Whether /opt/leasehold runs this checkout. False: there is no /opt/leasehold.
    """
    host = SystemdHost(folder, name, has_program=has_program)
    try:
        host.start()
        yield host
    finally:
        host.stop()


def drop_in(host: SystemdHost, unit: str, text: str, name: str = "test") -> None:
    """Adds settings to a unit, as the file of a name."""
    folder = f"/etc/systemd/system/{unit}.d"
    host.run("mkdir", "-p", folder)
    host.run("tee", f"{folder}/{name}.conf", text=textwrap.dedent(text))


def installed_files(host: SystemdHost) -> set[str]:
    """All files of a host that an installation may touch."""
    found = host.run("sh", "-c", f"find {' '.join(FOLDERS)} -xdev 2>/dev/null || true")
    # useradd(8) keeps the former content of its files under names with a hyphen.
    return {line for line in found.splitlines() if "__pycache__" not in line and not line.endswith("-")}
