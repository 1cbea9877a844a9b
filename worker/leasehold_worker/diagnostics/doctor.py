"""``leasehold doctor``: checks every precondition of this GPU host."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import click
import trio
from leasehold.v1.plan_pb2 import CheckResult

from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.agent.config_file import load_config
from leasehold_worker.criu.installation import probe
from leasehold_worker.diagnostics.checks import CHECKS, SERVICE_CHECKS
from leasehold_worker.diagnostics.examination import Examination, Look, NotOkError
from leasehold_worker.diagnostics.installed_service import InstalledService, ask_worker, main_process, user_of
from leasehold_worker.driver.errors import DriverError
from leasehold_worker.driver.helper_pool import Driver, DriverCallUnansweredError, DriverUnavailableError
from leasehold_worker.driver.process import CheckpointProcess
from leasehold_worker.errors import StartError
from leasehold_worker.files.workload_files import USER_FOLDERS
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.capabilities import give_up_unneeded
from leasehold_worker.host.service_unit import read_unit
from leasehold_worker.log_format import printable
from leasehold_worker.planning.findings import NOT_CHECKED, PASSED, REFUSED, WARNING, Check

EXIT_FAILED: Final = 1

WORDS: Final = {PASSED: "ok", WARNING: "warning", REFUSED: "FAILED", NOT_CHECKED: "not checked"}

Found = TypeVar("Found")


def run(
    config_path: Path | None,
    settings: Mapping[str, str | Path | None],
    timeout_s: float,
    output: str,
    *,
    with_host: bool = False,
) -> None:
    """Checks the host, and prints the findings. Exits with 1 if a check failed.

    Args:
        config_path: The worker's settings file. None: the system's, if there is one.
        settings: Settings that override the file, by name. None: as the file says.
        timeout_s: Timeout of each check.
        output: Output format: ``table`` or ``json``.
        with_host: Whether to check the installed service too.
    """
    logging.basicConfig(level="CRITICAL")  # what NVML and the helper would log is among the checks
    if with_host:
        checks = trio.run(_examine_service, config_path, settings, timeout_s, strict_exception_groups=True)
    else:
        config, error = _load(config_path, None, settings)
        # The worker does the same, and the checks are about what the worker may do.
        give_up_unneeded(config.state_dir / USER_FOLDERS, has_run_as=bool(config.run_as))
        checks = trio.run(examine, config, error, timeout_s, strict_exception_groups=True)
    click.echo(_document(checks) if output == "json" else "\n".join(_lines(checks)))
    if any(check.result == REFUSED for check in checks):
        sys.exit(EXIT_FAILED)


async def _examine_service(
    config_path: Path | None, settings: Mapping[str, str | Path | None], timeout_s: float
) -> list[Check]:
    """Examines the host and the installed service, with the settings of the service's user."""
    unit = await _within(timeout_s, partial(read_unit, timeout_s))
    uid = await _within(timeout_s, partial(user_of, unit)) if unit is not None else None
    load = partial(_load, config_path, uid if os.geteuid() == 0 else None, settings)
    config, error = await trio.to_thread.run_sync(load)
    unit = unit or "systemctl does not answer"
    main = await _within(timeout_s, partial(main_process, unit))
    late = f"no answer within {timeout_s:g} s"
    leases = await _within(timeout_s, partial(ask_worker, config, timeout_s)) or late
    return await examine(config, error, timeout_s, InstalledService(unit, uid, main, leases))


def _load(
    path: Path | None, owner_uid: int | None, settings: Mapping[str, str | Path | None]
) -> tuple[WorkerConfig, str | None]:
    """The configuration, or the default one with the reason why it is invalid."""
    try:
        return load_config(path, "", owner_uid, **settings), None
    except StartError as error:
        return WorkerConfig(), str(error)


async def examine(
    config: WorkerConfig,
    config_error: str | None,
    timeout_s: float,
    service: InstalledService | None = None,
) -> list[Check]:
    """Examines the host. A reading that hangs is abandoned in its thread, and reported.

    Args:
        config: The worker's configuration, or the default one if it is invalid.
        config_error: Why the configuration is invalid. None: it is valid.
        timeout_s: Timeout of each check.
        service: The installed service, which is checked too. None: only the host is checked.
    """
    inventory = await _within(timeout_s, Inventory)
    driver = Driver(timeout_s)
    try:
        await _probe(driver, timeout_s)
        asked, obstacle = await _trace_obstacle(driver)
        criu = await probe(config.criu or None, timeout_s=timeout_s)
        patient = Examination(config, config_error, driver, inventory, asked, obstacle, criu, service)
        looks = CHECKS if service is None else {**CHECKS, **SERVICE_CHECKS}
        return [await _look(name, look, patient, timeout_s) for name, look in looks.items()]
    finally:
        await driver.close()


async def _probe(driver: Driver, timeout_s: float) -> None:
    try:
        with trio.move_on_after(timeout_s) as scope:
            await driver.probe()
    except OSError as error:
        driver.unavailable_reason = f"the driver helper can't be started: {error}"
    if scope.cancelled_caught:
        driver.unavailable_reason = f"cuInit did not return within {timeout_s:g} s"


async def _look(name: str, look: Look, patient: Examination, timeout_s: float) -> Check:
    def outcome() -> Check:
        try:
            return Check(name, PASSED, look(patient))
        except NotOkError as error:
            return Check(name, error.result, str(error))
        except (OSError, ValueError) as error:  # a broken host can fail in unforeseen ways
            return Check(name, NOT_CHECKED, f"can't be read: {error}")

    late = Check(name, REFUSED, f"no answer within {timeout_s:g} s: look for hung tasks and Xid in dmesg")
    return await _within(timeout_s, outcome) or late


async def _within(timeout_s: float, function: Callable[[], Found]) -> Found | None:
    """The result of a function, called in a thread. None: it did not return in time."""
    with trio.move_on_after(timeout_s):
        return await trio.to_thread.run_sync(function, abandon_on_cancel=True)
    return None


async def _trace_obstacle(driver: Driver) -> tuple[bool, str | None]:
    """Whether the driver helper could check a child of this process, and the obstacle to its control.

    For the helper, a child of this process is like a workload. The child ends with this process.
    """
    wait_for_end = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    try:
        child = await trio.lowlevel.open_process(wait_for_end, stdin=subprocess.PIPE)
    except OSError:
        return False, None
    try:
        return True, await CheckpointProcess(driver, child.pid).trace_obstacle()
    except (DriverError, DriverCallUnansweredError, DriverUnavailableError):
        return False, None
    finally:
        with trio.CancelScope(shield=True):
            child.kill()
            await child.wait()


def _document(checks: list[Check]) -> str:
    return json.dumps(
        {
            "checks": [
                {"name": check.name, "result": CheckResult.Name(check.result), "detail": check.detail}
                for check in checks
            ]
        },
        indent=2,
    )


def _lines(checks: list[Check]) -> list[str]:
    width = max(len(check.name) for check in checks)
    lines = [
        printable(f"{check.name:<{width}}  {WORDS[check.result]:<11}  {check.detail}") for check in checks
    ]
    failed = sum(check.result == REFUSED for check in checks)
    warnings = sum(check.result == WARNING for check in checks)
    told = f"{warnings} warning{'' if warnings == 1 else 's'}"
    return [*lines, f"{len(checks)} checks: {failed} failed, {told}"]
