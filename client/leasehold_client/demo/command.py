"""The options of ``leasehold demo``."""

from pathlib import Path

import click

from leasehold_client import interrupts
from leasehold_client.cli.examples import examples
from leasehold_client.cli.parameter_types import GivenPath


@click.command(epilog=examples("leasehold demo", "leasehold demo --keep"))
@click.option("--keep", is_flag=True, help="Keep the fleet running at the end, until Ctrl-C.")
@click.option(
    "--dir",
    "folder",
    type=GivenPath(path_type=Path),
    help="New or empty folder for stores and logs, which is kept.  [default: a temporary folder]",
)
@click.option(
    "--counter",
    type=GivenPath(exists=True, dir_okay=False, path_type=Path),
    help="The counting program.  [default: examples/counter.py of Leasehold]",
)
@click.option(
    "--mutual-tls",
    is_flag=True,
    help="Enrol the workers and a user by join tokens. The coordinator then listens on all addresses.",
)
def demo(keep: bool, folder: Path | None, counter: Path | None, mutual_tls: bool) -> None:
    """Suspend, move and restore six counting processes on two simulated GPU hosts.

    The output of the counters shows whether a count was lost or a byte is corrupt. The result is one line of
    JSON, and the exit code is 1 in these cases.
    """
    from leasehold_client.demo import runner  # late: imports gRPC and protobuf

    interrupts.raise_in_verb()
    runner.run(folder, counter, keep=keep, is_mutual=mutual_tls)
