"""Checks of the Unix users of workloads for ``leasehold doctor``. They change nothing."""

import os
from collections.abc import Iterator

from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.diagnostics.examination import Examination, failed, warning
from leasehold_worker.host.accounts import find_account
from leasehold_worker.host.capabilities import NEEDED, capability_name, is_effective
from leasehold_worker.host.limit_files import read_lines
from leasehold_worker.host.processes import user_name
from leasehold_worker.programs.run_as import SAME_NAME, elsewhere, is_loopback, why_forbidden


def run_as(patient: Examination) -> str:
    """Whether the setting names users of this host, and the worker may start their programs."""
    config = patient.config
    if not config.run_as:
        if not is_loopback(config.coordinator):
            raise warning(f"the worker starts no program: {elsewhere(config.coordinator)}")
        return f"not set: programs run as {user_name(os.geteuid())}"
    if problems := [*_wrong_users(config), *_lacking(patient)]:
        raise failed(f"{'; '.join(problems)}: correct run_as, or the start of the worker")
    if isinstance(config.run_as, dict):
        return f"{len(config.run_as)} owners, each with a user of this host"
    return config.run_as


def user_limits(patient: Examination) -> str:
    """Whether the worker can use all lines with limits for the users of workloads."""
    if not patient.config.run_as:
        return "programs have the worker's, since run_as is not set"
    lines, problems = read_lines()
    if problems:
        raise warning("; ".join(problems))
    return f"{len(lines)} lines of limits.conf(5)"


def _wrong_users(config: WorkerConfig) -> Iterator[str]:
    """The problems with the users of the setting."""
    setting = config.run_as
    named = {"every owner": setting} if isinstance(setting, str) else setting
    for owner, user in named.items():
        if user == SAME_NAME and isinstance(setting, str):
            continue
        try:
            why = why_forbidden(find_account(user), setting, config.run_as_min_uid)
        except LookupError:
            why = "a user that this host does not have"
        if why:
            yield f"{owner} is mapped to {user}, which is {why}"


def _lacking(patient: Examination) -> Iterator[str]:
    """The capabilities that a worker without root lacks: the running one, or one that is as the doctor."""
    main = patient.service.main if patient.service is not None else None
    has = is_effective if main is None else main.has
    missing = [capability_name(number) for number in sorted(NEEDED) if not has(number)]
    if missing and (main is not None or os.geteuid() != 0):
        yield f"this user lacks {', '.join(missing)}"
