"""``leasehold logs``."""

from __future__ import annotations

import io
import sys
from collections import deque
from typing import TYPE_CHECKING, Final

import click

from leasehold_client.cli.examples import examples
from leasehold_client.cli.exit_codes import EXIT_INTERRUPTED
from leasehold_client.cli.names import complete_workloads
from leasehold_client.cli.parameter_types import Number
from leasehold_client.cli.verb import verb
from leasehold_client.display import standard_output

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client

TAIL_LIMIT: Final = 1_000_000
"""Most lines of --tail."""

TAIL_LIMIT_BYTES: Final = 64 << 20
"""Most bytes of --tail. Only the newest are kept, since a program may write a line without an end."""

TAIL_SIZES_BYTES: Final = (64 << 10, 2 << 20, TAIL_LIMIT_BYTES)
"""How much of an output is read for --tail: the next larger part, if the lines are not in the smaller one."""


@click.command(
    epilog=examples("leasehold logs one", "leasehold logs -f one", "leasehold logs one --tail 20 -f")
)
@click.argument("workload", shell_complete=complete_workloads)
@click.option("-f", "--follow", "follow_output", is_flag=True, help="Continue until the workload has ended.")
@click.option(
    "--tail", type=Number(0, TAIL_LIMIT), metavar="N", help="Begin with the last N lines.  [default: all]"
)
@verb
def logs(client: Client, workload: str, follow_output: bool, tail: int | None) -> None:
    """Print the output of a workload.

    Standard output and standard error are one stream. It has no times, so there is no --since.
    """
    try:
        offset = 0
        if tail is not None:
            workload = client.workload(workload).workload_id
            data, offset = _last_lines(client, workload, tail)
            if not standard_output.write(data) or not follow_output:
                return
        for data in client.output(workload, offset=offset, follow=follow_output):
            if not standard_output.write(data):
                break
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)  # no command continues, so there is nothing to say


def _last_lines(client: Client, workload: str, count: int) -> tuple[bytes, int]:
    """The last lines of the present output, and the position after it."""
    for size_bytes in TAIL_SIZES_BYTES:
        data, position, begin = _end_of_output(client, workload, count, size_bytes)
        if not begin or data.count(b"\n") > count:
            break
    found = io.BytesIO(data).readlines()  # a carriage return, as of a progress bar, ends no line
    return b"".join(found[-count:] if count else []), position


def _end_of_output(client: Client, workload: str, count: int, size_bytes: int) -> tuple[bytes, int, int]:
    """The end of the present output, and the positions after and before it.

    Args:
        client: The client.
        workload: Id of the workload.
        count: Number of lines that suffice.
        size_bytes: Number of bytes.
    """
    kept: deque[bytes] = deque()
    kept_bytes = lines = position = 0
    for part in client.output_parts(workload, offset=-size_bytes):
        position = part.next_offset
        kept.append(part.data)
        kept_bytes += len(part.data)
        lines += part.data.count(b"\n")
        # The first part may begin within a line, and the last line may have no end.
        while len(kept) > 1 and (lines - kept[0].count(b"\n") > count or kept_bytes > TAIL_LIMIT_BYTES):
            dropped = kept.popleft()
            kept_bytes -= len(dropped)
            lines -= dropped.count(b"\n")
    return b"".join(kept), position, position - kept_bytes
