"""Checks of the installed service for ``leasehold doctor --host``. They change nothing.

A finding that is not ok ends with the command that mends it.
"""

import os
import shlex
import stat
import time
from pathlib import Path
from typing import Final

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.diagnostics.examination import Examination, failed, not_checked, warning
from leasehold_worker.diagnostics.installed_service import DEFAULT_USER, InstalledService, user_of
from leasehold_worker.errors import StartError
from leasehold_worker.files.enrolment_file import read_enrolment
from leasehold_worker.files.workload_files import USER_FOLDERS
from leasehold_worker.host.capabilities import capability_name, needed_without_root
from leasehold_worker.host.cgroups import version_2_root
from leasehold_worker.host.clock_offset import WARNING_S, offset_text
from leasehold_worker.host.processes import user_name
from leasehold_worker.host.service_unit import UNIT, ServiceUnit
from leasehold_worker.local_api.unix_socket import MODE
from leasehold_worker.session.channel import INSECURE_SCHEME
from leasehold_worker.session.client_keys import expiry_s, span_text

RESTART: Final = f"`systemctl restart {UNIT}`"

OVERDUE_PART: Final = 0.1
"""Part of the time between the renewal and the expiry of a certificate, after which the renewal has failed.
Of 30 days it is 36 hours. A failed renewal is repeated after 90 s, and a refused one after 90 minutes."""

LOW_BYTES: Final = 2**30
"""The output of eight workloads (``output_limit`` is 128 MiB), or the copy of a journal at an upgrade."""

LEAST_BYTES: Final = 64 * 2**20
"""The journal and its log need some megabytes. Without them, the worker accepts no command."""

LOW_INODES: Final = 10_000
"""A workload has about ten files, of which 256 ended ones are kept, and a process image some hundreds."""

LEAST_INODES: Final = 100
"""The files of a few workloads."""

CORE_PATTERN: Final = Path("/proc/sys/kernel/core_pattern")
CONTROLLERS: Final = ("cpu", "memory")


def unit(patient: Examination) -> str:
    """Whether the unit is installed, runs as its file says, and starts at boot."""
    found = _unit(_service(patient))
    if found.active_state != "active":
        raise failed(f"{UNIT} is {found.active_state}; `journalctl -u {UNIT}` says why: run {RESTART}")
    if found.is_outdated:
        raise warning(
            f"{UNIT} was changed after its start: run `systemctl daemon-reload && systemctl restart {UNIT}`"
        )
    if found.file_state != "enabled":
        raise warning(f"{UNIT} does not start at boot: run `systemctl enable {UNIT}`")
    return f"{UNIT} is installed, enabled and active"


def user(patient: Examination) -> str:
    """Whether the unit's user exists, and owns the state directory."""
    service = _service(patient)
    found = _unit(service)
    if (uid := user_of(found)) is None:
        raise failed(f"{UNIT} runs as {found.user}, and no such user exists: run {_install(found)}")
    path = _valid(patient).config.state_dir
    try:
        owner = path.stat().st_uid
    except FileNotFoundError:
        raise failed(f"the state directory {path} does not exist: run {RESTART}") from None
    name = found.user or "root"
    if owner != uid:
        # After a `chown` of the directory alone, systemd leaves its files to the other user.
        # `--from` spares the folders of workloads' users.
        raise failed(
            f"the state directory {path} belongs to {user_name(owner)}, and {UNIT} runs as {name}: run "
            f"`chown -R --from={owner} {name}: {shlex.quote(str(path))} && systemctl restart {UNIT}`"
        )
    return f"{name}, who owns {path}"


def capabilities(patient: Examination) -> str:
    """Whether the running worker has what programs of other users need (docs/security.md)."""
    service = _service(patient)
    found, main = _unit(service), service.main
    if main is None:
        raise not_checked(f"the worker does not run: run {RESTART}")
    config = _valid(patient).config
    needed = needed_without_root(
        config.state_dir / USER_FOLDERS,
        has_run_as=bool(config.run_as),
        has_socket_group=bool(config.socket_group),
    )
    missing = [capability_name(number) for number in sorted(needed) if not main.has(number)]
    if missing:
        raise failed(
            f"the worker (pid {main.pid}) lacks {', '.join(missing)}; remove drop-ins that restrict it "
            f"(`systemctl cat {UNIT}`), and run {_install(found)}"
        )
    return f"the worker (pid {main.pid}) has all {len(needed)}"


def local_socket(patient: Examination) -> str:
    """Whether the socket for programs of this host is there, is the worker's, and answers."""
    service = _service(patient)
    path = _valid(patient).config.socket_path
    try:
        facts = path.lstat()
    except FileNotFoundError:
        raise failed(f"the socket {path} does not exist: {_restart(service)}") from None
    if not stat.S_ISSOCK(facts.st_mode):
        raise failed(f"{path} is not a socket: run `rm {shlex.quote(str(path))} && systemctl restart {UNIT}`")
    mode = stat.S_IMODE(facts.st_mode)
    owner = facts.st_uid if service.uid is None else service.uid
    if mode != MODE or facts.st_uid != owner:
        raise failed(
            f"{path} has mode {mode:04o} and belongs to {user_name(facts.st_uid)}, instead of "
            f"mode {MODE:04o} and the worker's user: {_restart(service)}"
        )
    if isinstance(service.leases, str):
        raise failed(f"the worker does not answer at {path} ({service.leases}): {_restart(service)}")
    return f"{path} answers"


def certificate(patient: Examination) -> str:
    """Whether the worker's certificate is valid, and is renewed in time."""
    service = _service(patient)
    config = _valid(patient).config
    login = service.unit.user if isinstance(service.unit, ServiceUnit) else ""
    name = shlex.quote(config.name)
    again = (
        f"run `leasehold token create --worker {name} --replace` on the coordinator's host, and here, with "
        f"that token, `systemctl stop {UNIT}; runuser -u {login or 'root'} -- leasehold worker --join - "
        f"--join-only; systemctl start {UNIT}`"
    )
    try:
        enrolment = read_enrolment(config.state_dir, service.uid)
    except PermissionError:
        raise not_checked(
            "only root and the worker's user can read it: run `sudo leasehold doctor --host`"
        ) from None
    except StartError as error:
        raise failed(f"{error}: {again}") from error
    if enrolment is None or not enrolment.certificate or config.coordinator.startswith(INSECURE_SCHEME):
        return "none: the worker has not joined by a token"
    try:
        expires_s = expiry_s(enrolment.certificate)
    except ValueError as error:
        raise failed(f"the certificate of {enrolment.identity} is damaged ({error}): {again}") from error
    now_s = time.time()
    if now_s > expires_s:
        raise failed(
            f"the certificate of {enrolment.identity} expired {span_text(now_s - expires_s)} ago: {again}"
        )
    left = f"the certificate of {enrolment.identity} expires in {span_text(expires_s - now_s)}"
    if now_s > enrolment.renew_s + OVERDUE_PART * (expires_s - enrolment.renew_s):
        raise warning(
            f"{left}, and its renewal has been due for {span_text(now_s - enrolment.renew_s)}; mend what the "
            f"log says: run `journalctl -u {UNIT} --grep renewed`"
        )
    return left


def disk(patient: Examination) -> str:
    """Whether state and checkpoints have room to grow."""
    config = _valid(patient).config
    told: list[str] = []
    for path in dict.fromkeys((config.state_dir, config.image_path)):
        nearest = next(part for part in (path, *path.parents) if part.exists())
        facts = os.statvfs(nearest)
        free, inodes = facts.f_bavail * facts.f_frsize, facts.f_favail
        numbers = f"{path} has {size_text(free)} of {size_text(facts.f_blocks * facts.f_frsize)} free"
        place = shlex.quote(str(nearest))
        if free < LOW_BYTES:
            kind = failed if free < LEAST_BYTES else warning
            least = f", less than {size_text(LEAST_BYTES if free < LEAST_BYTES else LOW_BYTES)}"
            raise kind(f"{numbers}{least}; delete what you don't need: run `du -xh {place} | sort -h | tail`")
        if facts.f_files == 0:  # such as Btrfs, which has no limit
            told.append(numbers)
            continue
        numbers += f", and {inodes} of {facts.f_files} inodes"
        if inodes < LOW_INODES:
            kind = failed if inodes < LEAST_INODES else warning
            least = f", less than {LEAST_INODES if inodes < LEAST_INODES else LOW_INODES}"
            raise kind(
                f"{numbers}{least}; delete what you don't need: run `du -x --inodes {place} | sort -n | tail`"
            )
        told.append(numbers)
    return "; ".join(told)


def clock(patient: Examination) -> str:
    """Whether this host and the coordinator agree about the time, by which certificates expire."""
    service = _service(patient)
    leases = service.leases
    if isinstance(leases, str):
        raise not_checked(f"the worker does not answer ({leases}): {_restart(service)}")
    if not leases.HasField("coordinator_clock_offset"):
        raise not_checked(
            "the worker has not been connected since its start, or its coordinator is older: run "
            f"`journalctl -u {UNIT} --grep session`"
        )
    offset = leases.coordinator_clock_offset
    offset_s = offset.seconds + offset.nanos / 1e9
    if abs(offset_s) > WARNING_S:
        raise warning(
            f"at the worker's last connection, {offset_text(offset_s)}; on the host whose clock is wrong: "
            "run `timedatectl set-ntp true`"
        )
    return f"at the worker's last connection, {offset_text(offset_s)}"


def cgroup_delegation(patient: Examination) -> str:
    """Whether the worker can limit CPU time and memory of workloads."""
    service = _service(patient)
    found = _unit(service)
    if not found.is_delegated:
        raise warning(f"{UNIT} lacks Delegate=yes, so workloads have no limits: run {_install(found)}")
    if not found.control_group:
        raise not_checked(f"{UNIT} has no control group, since it does not run: run {RESTART}")
    root = version_2_root()
    group = root / found.control_group.lstrip("/")
    offered = (group / "cgroup.controllers").read_text(encoding="ascii").split()
    if missing := [name for name in CONTROLLERS if name not in offered]:
        has_all = set(CONTROLLERS) <= set((root / "cgroup.controllers").read_text(encoding="ascii").split())
        raise warning(
            f"control group {group} lacks {' and '.join(missing)}, so workloads have no such limits: "
            + (f"run {RESTART}" if has_all else "boot with `systemd.unified_cgroup_hierarchy=1`")
        )
    for path in (group, group / "cgroup.procs", group / "cgroup.subtree_control"):
        facts = path.stat()
        if service.uid not in (0, facts.st_uid) or not facts.st_mode & stat.S_IWUSR:
            raise warning(f"{path} belongs to {user_name(facts.st_uid)}, not to the worker: run {RESTART}")
    return f"the worker has {' and '.join(CONTROLLERS)} in {group}"


def core_dumps(patient: Examination) -> str:
    """Whether a core dump of a suspended process could be written, which has its GPU memory (core(5))."""
    service = _service(patient)
    found = _unit(service)
    pattern = CORE_PATTERN.read_text(encoding="utf-8", errors="replace").strip()
    limit = service.main.core_limit if service.main else found.core_limit
    if pattern.startswith("|") and "systemd-coredump" not in pattern:
        # The kernel ignores the limit for a program. systemd-coredump(8) obeys the limit, and others may not.
        program = next(iter(pattern[1:].split(maxsplit=1)), "a program without a name")
        raise warning(
            f"a core dump of a suspended process has its GPU memory, and kernel.core_pattern gives it to "
            f"{program}, whatever its limit: run "
            "`sysctl -w kernel.core_pattern=core`"
        )
    if limit != "0":
        folder = f"/etc/systemd/system/{UNIT}.d"
        raise warning(
            "a core dump of a suspended process has its GPU memory, and programs of the worker may write "
            f"core dumps (limit {limit}, kernel.core_pattern {pattern}): run `mkdir -p {folder} && printf "
            f"'[Service]\\nLimitCORE=0\\n' > {folder}/core.conf && systemctl daemon-reload && "
            f"systemctl restart {UNIT}`"
        )
    return "none: the limit of the worker is 0"


def _service(patient: Examination) -> InstalledService:
    if patient.service is None:
        raise not_checked("the service was not asked for: run `leasehold doctor --host`")
    return patient.service


def _restart(service: InstalledService) -> str:
    """The command that starts the worker: that of its unit, or its own if the unit is unknown."""
    return "start `leasehold worker`" if isinstance(service.unit, str) else f"run {RESTART}"


def _unit(service: InstalledService) -> ServiceUnit:
    """The unit; without one, checks that need it are not made."""
    if isinstance(service.unit, str):
        raise not_checked(service.unit)
    if service.unit.load_state == "masked":
        raise failed(f"{UNIT} is masked: run `systemctl unmask {UNIT} && systemctl enable --now {UNIT}`")
    if service.unit.load_state != "loaded":
        raise failed(f"{UNIT} is not installed ({service.unit.load_state}): run {_install(service.unit)}")
    return service.unit


def _valid(patient: Examination) -> Examination:
    if patient.config_error is not None:
        raise not_checked("the configuration is invalid")
    return patient


def _install(found: ServiceUnit) -> str:
    """The command that writes the unit anew and restarts it."""
    own = f" --user {found.user}" if found.user not in ("", DEFAULT_USER) else ""
    return f"`leasehold install worker{own}`"
