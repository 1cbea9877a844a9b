"""``leasehold validate``: suspends, restores and moves a built-in program on this host's GPUs."""

import json
import logging
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

import click
import trio

from leasehold_worker.checkpoint.gpu_pairs import normalize_uuid
from leasehold_worker.config import WorkerConfig
from leasehold_worker.errors import OperationError
from leasehold_worker.parts import Parts, open_parts
from leasehold_worker.sizes import size_text
from leasehold_worker.validation import Step, Validation, ValidationError, Validator, choose_gpu

EXIT_FAILED: Final = 1
LEAST_BYTES: Final = 4096
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(|[KMGT]i?B?)", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class Size(click.ParamType):  # type: ignore[type-arg]  # not subscriptable at run time in click 8
    """A size in bytes, such as 256MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads the size, or fails with the rule."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        size = round(float(match[1]) * 1024 ** _POWERS[match[2][:1].lower()]) if match else 0
        if size < LEAST_BYTES:
            self.fail(f"{value!r} is no size of 4 KiB or more: write it like 256MiB", param, ctx)
        return size


@click.command(name="validate")
@click.option("--gpu", "gpu_uuid", metavar="UUID", help="GPU to use.  [default: most free memory]")
@click.option(
    "--bytes", "size_bytes", type=Size(), default="256MiB", show_default=True, help="What the program holds."
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How to print.",
)
def command(gpu_uuid: str | None, size_bytes: int, output: str) -> None:
    """Suspend, restore and move a built-in program on this host's GPUs, and prove each step.

    It needs no coordinator and no worker; GPUs that others use are shared with them for as long as it takes.
    """
    logging.basicConfig(level="CRITICAL")
    try:
        wanted = normalize_uuid(gpu_uuid) if gpu_uuid is not None else None
    except OperationError as error:
        raise click.BadParameter(error.message, param_hint="--gpu") from error
    document = trio.run(validate, wanted, size_bytes, strict_exception_groups=True)
    click.echo(json.dumps(document, indent=2) if output == "json" else "\n".join(_lines(document)))
    if document["error"] is not None:
        sys.exit(EXIT_FAILED)


async def validate(wanted: str | None, size_bytes: int) -> dict[str, Any]:
    """Validates, and says what was proved and what did not hold."""
    with tempfile.TemporaryDirectory(prefix="leasehold-validate-") as folder:
        async with open_parts(WorkerConfig(), Path(folder), lambda _: None) as parts:
            validation: Validation | None = None
            error: str | None = None
            try:
                free = await trio.to_thread.run_sync(parts.inventory.free_bytes, ())
                validation = Validation(choose_gpu(parts, wanted, free, size_bytes), size_bytes)
                await Validator(parts, Path(folder), validation).run()
            except ValidationError as raised:
                error = str(raised)
            return _document(parts, validation, error)


def _document(parts: Parts, validation: Validation | None, error: str | None) -> dict[str, Any]:
    versions = parts.inventory.versions
    return {
        "gpu_uuid": validation.gpu.uuid if validation else None,
        "gpu_name": validation.gpu.name if validation else None,
        "memory_bytes": validation.size_bytes if validation else None,
        "driver_version": versions.driver_version,
        "cuda_version": parts.driver.cuda_version,
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
