"""The options of ``leasehold validate``. Its help imports no large module of the worker."""

import signal
from typing import Any, Final

import click

from leasehold_worker.byte_sizes import parse_size

LEAST_BYTES: Final = 4096


class Size(click.ParamType):  # type: ignore[type-arg]  # not subscriptable at run time in click 8
    """A size in bytes, such as 256MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Reads the size, or fails with the rule."""
        if isinstance(value, int):
            return value
        try:
            size = parse_size(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size < LEAST_BYTES:
            self.fail(f"{value} is too small: give 4 KiB or more, like 256MiB", param, ctx)
        return size


EPILOG: Final = """\b
Example:
  leasehold validate --bytes 1GiB
"""


@click.command(name="validate", epilog=EPILOG)
@click.option("--gpu", "gpu_uuid", metavar="UUID", help="GPU to use.  [default: most free memory]")
@click.option(
    "--bytes",
    "size_bytes",
    type=Size(),
    default="256MiB",
    show_default=True,
    help="Memory of the program.",
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Output format.",
)
def command(gpu_uuid: str | None, size_bytes: int, output: str) -> None:
    """Suspend, restore and move a built-in program on this host's GPUs, and verify each step.

    It needs no coordinator and no worker. GPUs in use by others are shared with them meanwhile.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the validation handles SIGINT
    from leasehold_worker.diagnostics import validate  # late: see above

    validate.run(gpu_uuid, size_bytes, output)
