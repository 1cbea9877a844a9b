"""The options of ``leasehold demo``."""

from pathlib import Path

import click

from leasehold_client import interrupts


@click.command()
@click.option("--keep", is_flag=True, help="Leave it running at the end, until Ctrl-C.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Folder for stores and logs, kept.")
@click.option(
    "--counter",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The program that counts.  [default: Leasehold's own, examples/counter.py]",
)
def demo(keep: bool, folder: Path | None, counter: Path | None) -> None:
    """Suspend, move and restore six counting processes on two simulated GPU hosts.

    It checks from their own output that no count was lost and no byte is wrong, and prints one line of JSON.
    It fails unless both are so.
    """
    from leasehold_client.demo import runner  # late: the options need neither gRPC nor protobuf

    interrupts.raise_in_verb()
    runner.run(folder, counter, keep=keep)
