"""``leasehold top``."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final

import click

from leasehold_client import interrupts
from leasehold_client.cli.caller import caller
from leasehold_client.cli.exit_codes import fail, interrupted
from leasehold_client.cli.parameter_types import refuse_empty
from leasehold_client.cli.verb import as_option, context_option, coordinator_option
from leasehold_client.contexts import chosen_coordinator
from leasehold_client.errors import LeaseholdError, UsageError

EXAMPLES: Final = """\b
Examples:
  leasehold top
  leasehold top --coordinator gpu-control.example.com:7400
"""


@click.command(epilog=EXAMPLES)
@coordinator_option
@context_option
@as_option
def top(coordinator: str | None, context: str | None, on_behalf_of: str) -> None:
    """Show the fleet on a terminal, live, with keys to suspend, restore, move and stop.

    Each host has a slot for each GPU, with its holder, memory, utilization, temperature and health, and below
    them its parked workloads and its waiting claims. Open commands show their phases. A key shows the plan
    of an operation first, and changes nothing before you press y. Press ? for all keys.
    """
    interrupts.raise_in_verb()
    refuse_empty(click.get_current_context())
    try:
        # The screen is written to standard error.
        is_terminal = all(one is not None and one.isatty() for one in (sys.stdin, sys.stdout, sys.stderr))
        if not is_terminal or os.environ.get("TERM") == "dumb":
            lacks = "a terminal that moves its cursor, and TERM is dumb" if is_terminal else "a terminal"
            raise UsageError(
                f"top needs {lacks}: run it in one, or print the fleet with `leasehold get gpus` or "
                "`leasehold get gpus --watch`"
            )
        import asyncio  # late: most of the time of --help

        from leasehold_client.top.session import show

        address, found = chosen_coordinator(coordinator, context)
        name = found.name if found is not None else None
        code = asyncio.run(show(address, name, on_behalf_of, caller()))
    except LeaseholdError as error:
        fail(error)
    except KeyboardInterrupt:
        interrupted("commands that were stored continue: `leasehold get commands` shows them")
    if code == 128 + signal.SIGHUP:  # the exit would write to the terminal that is gone, and fail with 120
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.raise_signal(signal.SIGHUP)
    sys.exit(code)
