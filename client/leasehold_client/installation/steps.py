"""The steps of an installation and of its end. Each is told before it is done, and may be repeated."""

import os
import pwd
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from leasehold_client.errors import LeaseholdError
from leasehold_client.installation.services import SETTINGS_DIRECTORY, STATE_DIRECTORY, Service, settings_text

COMMAND_TIMEOUT_S: Final = 400.0
"""Longer than the units give a daemon to start or to stop."""

STATE_MODES: Final[Mapping[str, int]] = {"coordinator": 0o700, "worker": 0o711}
"""Permissions of state directories, as in the units. Users of a worker's workloads pass through its own."""

DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

PASSED: Final = frozenset({"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TZ"})
"""Variables of root that a join gets, besides those of Leasehold. The others may have secrets of root."""

SYSTEMD: Final = Path("/run/systemd/system")
CGROUPS: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"))


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        text: What it does, beginning with a verb.
        do: Does it.
    """

    text: str
    do: Callable[[], object]


def install_steps(
    service: Service, program: Path, unit: str, chosen: Mapping[str, str], join_token: str | None
) -> list[Step]:
    """The steps of an installation.

    Args:
        service: The service.
        program: The ``leasehold`` program.
        unit: The text of the unit.
        chosen: Settings by name, for a new file of settings.
        join_token: The token by which a worker joins. None: it has joined, or needs none.

    Raises:
        LeaseholdError: Settings are given, and the file of settings exists with others.
    """
    steps: list[Step] = []
    if not _has_user(service.user):
        steps.append(Step(f"create the Unix user {service.user}", partial(_create_user, service)))
    text = settings_text(service, chosen)
    if not service.settings_path.exists():
        steps.append(Step(f"write {service.settings_path}", partial(write, service.settings_path, text)))
    elif chosen and service.settings_path.read_text(encoding="utf-8", errors="replace") != text:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise LeaseholdError(
            f"{service.settings_path} exists, and is kept: leave out {options}, and edit the file"
        )
    if join_token is not None:
        join = partial(_join, service, program, join_token)
        steps.append(Step(f"join the coordinator of the token, as {service.user}", join))
    return [
        *steps,
        Step(f"write {service.unit_path}", partial(write, service.unit_path, unit)),
        Step(f"start {service.unit}, now and at each boot", partial(_start, service)),
    ]


def uninstall_steps(service: Service, *, purge: bool) -> list[Step]:
    """The steps of an uninstallation.

    Args:
        service: The service.
        purge: Whether settings, state and the Unix user go too.
    """
    steps: list[Step] = []
    if service.unit_path.exists():
        if purge:
            steps.append(Step(f"stop {service.unit}", partial(_stop, service)))
        steps.append(Step(f"disable {service.unit}, and remove it", partial(_remove_unit, service)))
    if not purge:
        return steps
    is_installed = bool(steps)
    for path in (service.settings_path, service.state_directory):
        if path.exists():
            steps.append(Step(f"remove {path}", partial(_remove, path)))
    if _has_user(service.user) and pwd.getpwnam(service.user).pw_gecos.split(",")[0] == service.comment:
        steps.append(Step(f"remove the Unix user {service.user}", partial(_run, "userdel", service.user)))
    if steps and not is_installed:
        look = partial(_require_no_processes, service)
        steps.insert(0, Step("look for processes of workloads", look))
    return steps


def kept(service: Service) -> list[str]:
    """The names of files and users that an uninstallation without a purge leaves."""
    paths = [str(path) for path in (service.settings_path, service.state_directory) if path.exists()]
    return paths + ([f"the Unix user {service.user}"] if _has_user(service.user) else [])


def installed_user(unit: Path) -> str | None:
    """The Unix user that an installed unit names. None: there is no unit, or it names none."""
    try:
        found = re.search(r"(?m)^User=(.+)$", unit.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return found[1].strip() if found else None


def require_host() -> None:
    """Refuses what can't be installed on.

    Raises:
        LeaseholdError: The caller is not root, or the host does not run systemd.
    """
    if os.geteuid() != 0:
        raise LeaseholdError("only root installs services: run it by sudo, or look at --dry-run")
    if not SYSTEMD.is_dir():
        raise LeaseholdError(
            "this host does not run systemd: run `leasehold coordinator` and `leasehold worker` by what "
            "starts its services"
        )


def _has_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def _create_user(service: Service) -> None:
    _run(
        *("useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin"),
        *("--home-dir", str(service.state_directory), "--comment", service.comment, service.user),
    )


def write(path: Path, text: str) -> None:
    """Writes a file of root's, in a directory that only root may change.

    Raises:
        LeaseholdError: Users other than root could replace the file.
        OSError: It can't be written.
    """
    path.parent.mkdir(mode=0o755, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    with roots_directory(path.parent) as parent:
        with suppress(FileNotFoundError):
            os.unlink(new.name, dir_fd=parent)
        descriptor = os.open(
            new.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=parent
        )
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o644)
            file.write(text)
        os.replace(new.name, path.name, src_dir_fd=parent, dst_dir_fd=parent)


@contextmanager
def roots_directory(path: Path) -> Iterator[int]:
    """A descriptor of a directory that only root may change.

    Raises:
        LeaseholdError: Others may.
        OSError: It can't be opened, or is a link.
    """
    descriptor = os.open(path, DIRECTORY)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != 0 or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise LeaseholdError(f"users other than root may change {path}: give it to root with mode 0755")
        yield descriptor
    finally:
        os.close(descriptor)


def make_directory(path: Path, mode: int, account: pwd.struct_passwd) -> None:
    """Makes the state directory of a daemon, or gives an existing one to the daemon's user.

    The daemon's user owns the directory, and the other daemon's directory may be beside it. So no link is
    followed, and only root may own or change the directory above.

    Args:
        path: The directory.
        mode: Its permissions if it is new.
        account: The Unix user of the daemon.

    Raises:
        LeaseholdError: Users other than root could replace the directory.
        OSError: It can't be made, or is a link.
    """
    path.parent.mkdir(mode=0o755, exist_ok=True)
    with roots_directory(path.parent) as parent:
        with suppress(FileExistsError):
            os.mkdir(path.name, mode, dir_fd=parent)
        directory = os.open(path.name, DIRECTORY, dir_fd=parent)
        try:
            os.fchown(directory, account.pw_uid, account.pw_gid)
        finally:
            os.close(directory)


def _join(service: Service, program: Path, token: str) -> None:
    """Joins as the user of the service, so that the files are its own, and a bad token is told at once."""
    account = pwd.getpwnam(service.user)
    make_directory(service.state_directory, STATE_MODES[service.name], account)
    done = subprocess.run(
        [str(program), "worker", "--join", "-", "--join-only"],
        input=token,
        text=True,
        capture_output=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
        user=account.pw_uid,
        group=account.pw_gid,
        extra_groups=os.getgrouplist(service.user, account.pw_gid),
        cwd="/",
        env={
            **{
                name: value
                for name, value in os.environ.items()
                if name in PASSED or name.startswith("LEASEHOLD_")
            },
            "HOME": str(service.state_directory),
        },
        # The user could type into the terminal of root otherwise (TIOCSTI of ioctl_tty(2)).
        start_new_session=True,
    )
    if done.returncode:
        raise LeaseholdError(_last_line(done.stderr).removeprefix("leasehold worker: "))


def _start(service: Service) -> None:
    _run("systemctl", "daemon-reload")
    _run("systemctl", "enable", "--quiet", service.unit)
    try:
        _run("systemctl", "restart", service.unit)
    except LeaseholdError:
        log = subprocess.run(
            ["journalctl", "--unit", service.unit, "--lines", "20", "--output", "cat", "--no-pager"],
            text=True,
            capture_output=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        own = [line for line in log.stdout.splitlines() if line.startswith("leasehold ")]
        raise LeaseholdError(
            f"{service.unit} does not start: {own[-1] if own else 'it says no reason'}; its log: "
            f"journalctl -u {service.unit}"
        ) from None


def _stop(service: Service) -> None:
    """Stops the service, unless programs of workloads would be left without it."""
    shown = _run("systemctl", "show", "--property", "ControlGroup", "--value", service.unit).strip()
    group = shown or _default_group(service)  # systemd shows none for a unit that it has not started
    _run("systemctl", "stop", service.unit)
    deadline = time.monotonic() + 5
    while (left := _processes(group)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if left:
        _run("systemctl", "start", service.unit)
        raise _still_running(left)


def _require_no_processes(service: Service) -> None:
    """Refuses a purge after an uninstallation that left workloads. Systemd knows the unit no more.

    Raises:
        LeaseholdError: The unit's control group has processes.
    """
    if left := _processes(_default_group(service)):
        raise _still_running(left)


def _default_group(service: Service) -> str:
    """The control group of a unit without ``Slice=``."""
    return f"/system.slice/{service.unit}"


def _still_running(left: Sequence[int]) -> LeaseholdError:
    return LeaseholdError(
        f"{len(left)} processes of workloads run on, such as {left[0]}: end them by `leasehold stop` "
        "(an uninstalled worker must be installed again for that), or leave out --purge"
    )


def _processes(control_group: str) -> list[int]:
    """The processes of a control group and those below."""
    found: set[int] = set()
    for base in CGROUPS:
        for path in (base / control_group.lstrip("/")).rglob("cgroup.procs"):
            with suppress(OSError):  # the group has been removed, since its last process ended
                found.update(int(pid) for pid in path.read_text(encoding="ascii").split())
    return sorted(found)


def _remove_unit(service: Service) -> None:
    _run("systemctl", "disable", "--quiet", "--now", service.unit)
    service.unit_path.unlink()
    _run("systemctl", "daemon-reload")
    with suppress(OSError):  # it has the socket of the other daemon, or is gone
        service.socket.parent.parent.rmdir()


def _remove(path: Path) -> None:
    """Removes a file or a directory, and its parent if that is Leasehold's and empty now."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if path.parent in (SETTINGS_DIRECTORY, STATE_DIRECTORY) and not any(path.parent.iterdir()):
        path.parent.rmdir()


def _run(*arguments: str) -> str:
    """Runs a command, and returns its standard output.

    Raises:
        LeaseholdError: The command is missing, or failed.
    """
    try:
        done = subprocess.run(
            arguments, text=True, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LeaseholdError(f"`{' '.join(arguments)}` failed: {error}") from error
    if done.returncode:
        raise LeaseholdError(f"`{' '.join(arguments)}` failed: {_last_line(done.stderr)}")
    return done.stdout


def _last_line(text: str) -> str:
    return next(iter(text.strip().splitlines()[::-1]), "without a message")


def do_all(steps: Sequence[Step], tell: Callable[[str], object]) -> None:
    """Does steps in their order, and tells each before.

    Raises:
        LeaseholdError: A step failed. Those before it are done.
    """
    # With a umask such as 077, the users of the daemons could not enter new directories in /etc and /var/lib.
    umask = os.umask(0o022)
    try:
        for step in steps:
            tell(step.text)
            try:
                step.do()
            except OSError as error:
                raise LeaseholdError(f"can't {step.text}: {error.strerror or error}") from error
    finally:
        os.umask(umask)
