"""Members that the kernel's OOM killer ends during an operation.

A suspend moves device memory into the host memory of the member, and so into its control groups. If a limit
is reached, the kernel ends a process with SIGKILL, and the driver only reports that the member is gone. Only
control groups of version 2 count that by limit (cgroup-v2.rst of Linux).
"""

import signal
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.driver.members import GONE, MemberOutcome
from leasehold_worker.errors import OperationError
from leasehold_worker.host.cgroups import memory_groups
from leasehold_worker.host.process_files import number, read_process_file
from leasehold_worker.host.process_folders import stat_fields
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.host.processes import ProcessIdentity, identify

EXPLANATION_TIMEOUT_S: Final = 2.0
"""Timeout of the search for causes. A rollback waits for it, also of members of other users."""

_GROUP: Final = "control_group"
_EXIT_CODE: Final = 49
"""Place of the exit code among the fields after the name (proc_pid_stat(5)). Only zombies have one."""


@dataclass(frozen=True, slots=True)
class OomCounts:
    """The counters of a control group and its descendants.

    Attributes:
        group: Its directory.
        limit_bytes: Its memory limit. None: it has none.
        hits: How often the limit was reached, and nothing could be reclaimed.
        kills: How many processes the OOM killer has ended.
    """

    group: Path
    limit_bytes: int | None
    hits: int
    kills: int


@final
class OomWatch:
    """The counters of the members' control groups at the begin of an operation."""

    def __init__(self) -> None:
        self._before: Mapping[ProcessIdentity, Sequence[OomCounts]] = {}

    async def begin(self, members: Sequence[ProcessIdentity]) -> None:
        """Reads the counters of all members. Those that can't be read in time are unknown."""

        def look() -> dict[ProcessIdentity, Sequence[OomCounts]]:
            found = {each: oom_counts(memory_groups(each.pid)) for each in members}
            return {each: counts for each, counts in found.items() if identify(each.pid) == each}

        self._before = {}
        with suppress(OperationError):
            self._before = await read_process(members[0].pid, look) if members else {}

    async def explain(self, outcomes: Iterable[MemberOutcome]) -> None:
        """Adds control group and limit to the errors of ended members. An unknown cause changes no error.

        A user can keep the reading of own processes waiting (:func:`read_process`), and can own many of them.
        So all of them have one timeout.
        """
        with trio.move_on_after(EXPLANATION_TIMEOUT_S):
            for outcome in outcomes:
                error, identity = outcome.error, outcome.member.identity
                if outcome.state_after != GONE or error is None or _GROUP in error.metadata:
                    continue
                if error.reason == errors_pb2.ERROR_REASON_TARGET_CRASHED and identity in self._before:
                    with suppress(OperationError):
                        outcome.error = await _explained(error, identity.pid, self._before[identity])


async def _explained(error: OperationError, pid: int, before: Sequence[OomCounts]) -> OperationError:
    def look() -> OomCounts | None:
        after = oom_counts(each.group for each in before)
        return exceeded(before, after) if may_be_killed(pid) else None

    if (limit := await read_process(pid, look)) is None:
        return error
    return OperationError(
        error.reason,
        f"process {pid} has ended: the kernel's OOM killer ended it, or another process of control group "
        f"{limit.group}, whose limit of {limit.limit_bytes} bytes (memory.max) was reached: raise the limit, "
        "or have the workload use less host memory",
        {**error.metadata, _GROUP: str(limit.group), "limit_bytes": str(limit.limit_bytes)},
    )


def oom_counts(groups: Iterable[Path]) -> list[OomCounts]:
    """The counters of groups, in order. Groups without counters are left out. It may block."""
    return [counts for group in groups if (counts := _counts(group)) is not None]


def exceeded(before: Sequence[OomCounts], after: Sequence[OomCounts]) -> OomCounts | None:
    """The innermost group whose limit was reached while the OOM killer ended a process there.

    Args:
        before: The counters of a process's groups, innermost first.
        after: Those of the same groups later. If a group was removed meanwhile, the limit is unknown.
    """
    if [each.group for each in before] != [each.group for each in after]:
        return None
    for early, late in zip(before, after, strict=True):
        if late.kills > early.kills and late.hits > early.hits and late.limit_bytes is not None:
            return late
    return None


def may_be_killed(pid: int) -> bool:
    """Whether SIGKILL may have ended a process. True if the process was reaped. It may block."""
    fields = stat_fields(read_process_file(pid, "stat").decode(errors="replace") or ")")
    code = number(fields[_EXIT_CODE]) if len(fields) > _EXIT_CODE else None
    return not code or code & 0x7F == signal.SIGKILL


def _counts(group: Path) -> OomCounts | None:
    try:
        lines = (group / "memory.events").read_text(encoding="ascii").splitlines()
        events = dict(line.split() for line in lines)
        limit_bytes = number((group / "memory.max").read_text(encoding="ascii"))
        return OomCounts(group, limit_bytes, int(events["oom"]), int(events["oom_kill"]))
    except (OSError, ValueError, KeyError):
        return None
