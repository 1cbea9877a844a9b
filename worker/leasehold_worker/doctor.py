"""``leasehold doctor``: looks at every precondition of this GPU host."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Final

import click
import trio
from leasehold.v1.plan_pb2 import CheckResult

from leasehold_worker.checkpoint.driver import (
    Driver,
    DriverCallUnansweredError,
    DriverUnavailableError,
    open_driver,
)
from leasehold_worker.checkpoint.driver_errors import DriverError
from leasehold_worker.checkpoint.process import CheckpointProcess
from leasehold_worker.config import WorkerConfig, load_config
from leasehold_worker.doctor_checks import CHECKS, Patient
from leasehold_worker.errors import StartError
from leasehold_worker.inventory import Inventory
from leasehold_worker.plan import NOT_CHECKED, PASSED, REFUSED, WARNING, Check, Findings

EXIT_FAILED: Final = 1
CALL_FLOOR_S: Final = 10.0

WORDS: Final = {PASSED: "ok", WARNING: "warning", REFUSED: "FAILED", NOT_CHECKED: "not checked"}


@click.command(name="doctor")
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar="LEASEHOLD_WORKER_CONFIG",
    help="The worker's TOML file.  [default: /etc/leasehold/worker.toml, if it exists]",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How to print.",
)
def command(config_path: Path | None, output: str) -> None:
    """Check this GPU host: every precondition, each ok or with its remedy.

    It changes nothing, and a worker may run meanwhile. It exits with 1 if something failed; warnings are not
    failures.
    """
    logging.basicConfig(level="CRITICAL")  # what NVML and the helper would log is among the checks
    error: str | None = None
    try:
        config = load_config(config_path)
    except StartError as raised:
        config, error = WorkerConfig(), str(raised)
    checks = trio.run(examine, config, error, strict_exception_groups=True)
    click.echo(_document(checks) if output == "json" else "\n".join(_lines(checks)))
    if any(check.result == REFUSED for check in checks):
        sys.exit(EXIT_FAILED)


async def examine(config: WorkerConfig, config_error: str | None) -> list[Check]:
    """Looks at the host, in bounded time."""
    inventory = await trio.to_thread.run_sync(Inventory)
    findings = Findings()
    async with open_driver(CALL_FLOOR_S) as driver:
        asked, obstacle = await _trace_obstacle(driver)
        patient = Patient(config, config_error, driver, inventory, obstacle, asked)
        for check in CHECKS:
            await trio.to_thread.run_sync(check, patient, findings)
    return findings.checks


async def _trace_obstacle(driver: Driver) -> tuple[bool, str | None]:
    """Whether the driver helper could be asked about a child of ours, and what is in its way there.

    A child of this process is to the helper what a workload is.
    """
    child = await trio.lowlevel.open_process(["sleep", "60"], stdin=subprocess.DEVNULL)
    try:
        return True, await CheckpointProcess(driver, child.pid).trace_obstacle()
    except (DriverError, DriverCallUnansweredError, DriverUnavailableError):
        return False, None
    finally:
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
    lines = [f"{check.name:<{width}}  {WORDS[check.result]:<11}  {check.detail}" for check in checks]
    failed = sum(check.result == REFUSED for check in checks)
    warnings = sum(check.result == WARNING for check in checks)
    return [*lines, f"{len(checks)} checks: {failed} failed, {warnings} warnings"]
