"""Changes of the files with the worker's certificate, after which the worker connects again."""

from pathlib import Path
from typing import Final, TypeAlias

import trio

from leasehold_worker.session.channel import CERTIFICATE_FILES, FILES
from leasehold_worker.threads import run_in_thread

POLL_INTERVAL_S: Final = 5.0

Look: TypeAlias = list[tuple[int, ...]]
"""The facts that change with the contents of the files. Empty: a file is missing."""


async def wait_for_change(directory: Path, before: Look) -> None:
    """Waits until the files in a directory have changed, and are the same for two looks.

    Args:
        directory: The directory.
        before: The files that the connection uses. Empty: the connection uses none, and this never returns.
    """
    if not before:
        await trio.sleep_forever()
    seen = before
    while True:
        await trio.sleep(POLL_INTERVAL_S)
        try:
            present = await run_in_thread(look, directory, abandon_on_cancel=True)
        except OSError:  # no thread can be started: a later look finds the change
            continue
        if present == seen and present not in ([], before):
            return
        seen = present


def look(directory: Path) -> Look:
    """Looks at the files. Blocks."""
    try:
        found = [(directory / name).stat() for name in (FILES[0], *CERTIFICATE_FILES)]
    except OSError:
        return []
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found]
