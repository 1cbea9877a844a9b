"""The worker's installed service, as the checks of ``leasehold doctor --host`` see it."""

import pwd
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from leasehold.local.v1.local_service_pb2 import ListResponse

from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.host.process_files import read_process_file, read_status
from leasehold_worker.host.processes import identify, is_alive
from leasehold_worker.host.service_unit import ServiceUnit
from leasehold_worker.local_api.local_client import list_leases

DEFAULT_USER: Final = "leasehold-worker"
"""The Unix user of an installation without ``--user``."""


@dataclass(frozen=True, slots=True)
class MainProcess:
    """The process of the running worker.

    Attributes:
        pid: Its pid.
        capabilities: Its effective capabilities, a bit for each number.
        core_limit: Its soft limit of core dumps: bytes, or ``unlimited``.
    """

    pid: int
    capabilities: int
    core_limit: str

    def has(self, number: int) -> bool:
        """Whether a capability is effective."""
        return bool(self.capabilities >> number & 1)


@dataclass(frozen=True, slots=True)
class InstalledService:
    """The service.

    Attributes:
        unit: Its unit, or the reason why that is unknown.
        uid: The id of the unit's user. None: no unit is loaded, or the host has no such user.
        main: The process of the running worker. None: the unit has none.
        leases: The answer of the running worker, or the reason why there is none.
    """

    unit: ServiceUnit | str
    uid: int | None
    main: MainProcess | None
    leases: ListResponse | str


def user_of(unit: ServiceUnit | str) -> int | None:
    """The id of a unit's user, whose look-up may block. None: no unit is loaded, or there is no such user."""
    if isinstance(unit, str) or unit.load_state != "loaded":
        return None
    try:
        return int(unit.user) if unit.user.isdecimal() else pwd.getpwnam(unit.user or "root").pw_uid
    except KeyError:
        return None


def main_process(unit: ServiceUnit | str) -> MainProcess | None:
    """The process of the running worker. None: there is none, or it ended during the reading.

    Its control group tells it from another process, which may have got its pid since systemd was asked. A
    unit without a control group has no process.
    """
    identity = identify(unit.main_pid) if isinstance(unit, ServiceUnit) and unit.main_pid else None
    if identity is None or isinstance(unit, str):
        return None
    groups = read_process_file(identity.pid, "cgroup").decode(errors="replace").splitlines()
    effective = read_status(identity.pid).get("CapEff", "0")
    limits = read_process_file(identity.pid, "limits").decode(errors="replace").splitlines()
    own = PurePosixPath(unit.control_group)
    is_of_unit = any(PurePosixPath(line.split(":", 2)[-1]).is_relative_to(own) for line in groups)
    if not unit.control_group or not is_of_unit or not is_alive(identity):
        return None
    core_limit = next(
        (line.split()[4] for line in limits if line.startswith("Max core file size")), "unlimited"
    )
    return MainProcess(identity.pid, int(effective, 16), core_limit)


def ask_worker(config: WorkerConfig, timeout_s: float) -> ListResponse | str:
    """The answer of the running worker, or the reason why there is none. Blocks for the timeout at most."""
    try:
        return list_leases(config.socket_path, timeout_s)
    except OSError as error:
        return str(error)
