"""``leasehold validate``: suspends, restores and moves a built-in program on this host's GPUs."""

import json
import logging
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import click
import trio

from leasehold_worker import __version__
from leasehold_worker.agent.assembly import Parts, open_parts
from leasehold_worker.agent.config import WorkerConfig
from leasehold_worker.byte_sizes import size_text
from leasehold_worker.diagnostics.observer import ValidationError
from leasehold_worker.diagnostics.validator import Step, UnknownGpuError, Validation, Validator, choose_gpu
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import Inventory, SystemVersions
from leasehold_worker.gpus.uuids import normalize_uuid

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_SIGNAL: Final = 128
"""Base of the exit code of a program that a signal ended; the signal's number is added."""

NVML_TIMEOUT_S: Final = 30.0
SEE_DOCTOR: Final = "see `leasehold doctor`"


def run(gpu_uuid: str | None, size_bytes: int, output: str) -> None:
    """Validates, and prints the verified steps. Exits with the code of the outcome.

    Args:
        gpu_uuid: GPU to use. None: the one with most free memory.
        size_bytes: Device memory of the program.
        output: Output format: ``table`` or ``json``.

    Raises:
        BadParameter: The name is not the UUID of a GPU.
    """
    logging.basicConfig(level="CRITICAL")
    try:
        wanted = normalize_uuid(gpu_uuid) if gpu_uuid is not None else None
    except OperationError as error:
        raise click.BadParameter(error.message, param_hint="--gpu") from error
    outcome = trio.run(validate, wanted, size_bytes, strict_exception_groups=True)
    if outcome.signal_number is not None:
        notes = "".join(f"; {note}" for note in outcome.document["notes"])
        name = signal.Signals(outcome.signal_number).name
        click.echo(f"leasehold: interrupted by {name}, nothing is verified{notes}", err=True)
    else:
        document = outcome.document
        click.echo(json.dumps(document, indent=2) if output == "json" else "\n".join(_lines(document)))
    sys.exit(outcome.exit_code)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a validation.

    Attributes:
        document: Verified steps, and the failed condition.
        exit_code: Of the command.
        signal_number: Signal that interrupted it. None: there was none.
    """

    document: dict[str, Any]
    exit_code: int
    signal_number: int | None = None


@final
class _Interrupts:
    """SIGINT and SIGTERM, each of which cancels the innermost given scope."""

    def __init__(self, scope: trio.CancelScope) -> None:
        self.scopes = [scope]
        self.signal_number: int | None = None

    async def listen(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            self.signal_number = self.signal_number or number
            self.scopes[-1].cancel()


async def validate(wanted: str | None, size_bytes: int) -> Outcome:
    """Validates, and returns the outcome. A signal ends the program, and then the validation."""
    document, exit_code = _document(None, None, None), EXIT_FAILED
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            interrupts = _Interrupts(nursery.cancel_scope)
            nursery.start_soon(interrupts.listen, signals)
            if await _nvml_answers():
                document, exit_code = await _validate(wanted, size_bytes, interrupts)
            else:
                document["error"] = f"NVML did not answer within {NVML_TIMEOUT_S:g} s: {SEE_DOCTOR}"
            nursery.cancel_scope.cancel()
    if interrupts.signal_number is not None:
        return Outcome(document, EXIT_SIGNAL + interrupts.signal_number, interrupts.signal_number)
    return Outcome(document, exit_code)


async def _nvml_answers() -> bool:
    """Whether NVML answers; if it hangs, its thread is abandoned."""
    with trio.move_on_after(NVML_TIMEOUT_S):
        inventory = await trio.to_thread.run_sync(Inventory, abandon_on_cancel=True)
        return await trio.to_thread.run_sync(inventory.answers, abandon_on_cancel=True)
    return False


async def _validate(
    wanted: str | None, size_bytes: int, interrupts: _Interrupts
) -> tuple[dict[str, Any], int]:
    with tempfile.TemporaryDirectory(prefix="leasehold-validate-") as folder:
        config = WorkerConfig(state_dir=Path(folder, "state"))
        async with open_parts(config, Path(folder), lambda _: None) as parts:
            validation: Validation | None = None
            error: str | None = None
            exit_code = 0
            # The parts must outlive the steps: they watch for the end of the program.
            with trio.CancelScope() as steps:
                interrupts.scopes.append(steps)
                try:
                    room = await trio.to_thread.run_sync(parts.inventory.room, ())
                    validation = Validation(
                        choose_gpu(parts, wanted, room.free_bytes, size_bytes), size_bytes
                    )
                    await Validator(parts, Path(folder), validation).run()
                except ValidationError as raised:
                    error = str(raised)
                    exit_code = EXIT_USAGE if isinstance(raised, UnknownGpuError) else EXIT_FAILED
            return _document(parts, validation, error), exit_code


def _document(parts: Parts | None, validation: Validation | None, error: str | None) -> dict[str, Any]:
    versions = parts.inventory.versions if parts else SystemVersions()
    return {
        "gpu_uuid": validation.gpu.uuid if validation else None,
        "gpu_name": validation.gpu.name if validation else None,
        "memory_bytes": validation.size_bytes if validation else None,
        "driver_version": versions.driver_version,
        "cuda_version": parts.driver.cuda_version if parts else None,
        "nvml_version": versions.nvml_version,
        "bindings_version": (parts.driver.bindings_version or None) if parts else None,
        "leasehold_version": __version__,
        "steps": [_step(step) for step in validation.steps] if validation else [],
        "notes": validation.notes if validation else [],
        "error": error,
    }


def _step(step: Step) -> dict[str, Any]:
    return {
        "name": step.name,
        "duration_s": round(step.duration_s, 4),
        "gigabytes_per_s": {call: round(rate / 1e9, 3) for call, rate in step.bytes_per_s.items()},
        "proved": step.proved,
    }


def _lines(document: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    if document["gpu_uuid"]:
        lines.append(
            f"{document['gpu_name']} {document['gpu_uuid']}, driver {document['driver_version']}, "
            f"{size_text(document['memory_bytes'])}"
        )
    for step in document["steps"]:
        rates = ", ".join(f"{call} {rate:.2f} GB/s" for call, rate in step["gigabytes_per_s"].items())
        lines.append(f"{step['name']:<20}  {step['duration_s']:>8.3f} s  {rates:<40}  {step['proved']}")
    lines += [f"note: {note}" for note in document["notes"]]
    verdict = "valid: everything held" if document["error"] is None else f"NOT valid: {document['error']}"
    return [*lines, verdict]
