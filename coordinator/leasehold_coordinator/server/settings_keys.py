"""Unknown keys of a settings file."""

from collections.abc import Iterable
from pathlib import Path

from leasehold_coordinator.errors import StartError


def require_known(path: Path, keys: Iterable[str], known: Iterable[str], table: str = "") -> None:
    """Refuses a key that is not known, and suggests the closest one.

    Args:
        path: The file, for the message.
        keys: The keys in the file.
        known: The known keys.
        table: The table of the keys. Empty: the top level.

    Raises:
        StartError: A key is unknown.
    """
    known = [*known]
    for key in keys:
        if key not in known:
            from difflib import get_close_matches  # late: most keys are right

            close = get_close_matches(key[:100].lower(), known, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it"
            where = f" in the table {table}" if table else ""
            raise StartError(
                f"the configuration {path} has the unknown key {key[:100]!r}{where}: {remedy} "
                "(docs/cli.md#settings lists the keys)"
            )
