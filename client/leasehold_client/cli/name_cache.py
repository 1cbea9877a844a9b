"""Names for shell completion, in a small file per coordinator.

A shell runs a new process for each Tab. Most of them read this file, since a call to the coordinator takes
longer than a person should wait. A coordinator that is away costs one Tab FETCH_LIMIT_S, and the next Tabs
nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

from leasehold_client.config import read_settings_file

Names: TypeAlias = Mapping[str, Mapping[str, str]]
"""A remark, such as a state, by name, by plural of the kind."""

FRESH_S: Final = 15.0
"""How long a file is used without a call."""

USABLE_S: Final = 3_600.0
"""How long a file is used if no coordinator answers."""

FETCH_LIMIT_S: Final = 2.0
"""How long a Tab waits for a coordinator."""

NAME_LIMIT: Final = 1_000
"""Most names of one kind in a file."""

FILE_LIMIT: Final = 16
"""Most files. The oldest one is deleted."""

_SAFE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@+-]{0,127}")
"""Names that a shell does not interpret. Others are not completed, whatever a coordinator says."""


def cache_directory() -> Path:
    """The directory of the files."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "leasehold"


def cached_names(coordinator: str, fetch: Callable[[], Names]) -> Names:
    """The names of a coordinator, from its file or by a call. Raises nothing.

    Args:
        coordinator: What identifies the coordinator and the caller.
        fetch: Asks the coordinator.

    Returns:
        The names. Empty: the coordinator does not answer in time, and there is no file of the last hour.
    """
    try:
        file = cache_directory() / f"names-{hashlib.sha256(coordinator.encode()).hexdigest()[:16]}.json"
    except (RuntimeError, UnicodeError):  # no home directory; an argument that is no text
        return {}
    known, known_s, asked_s = _read(file)
    now_s = time.time()
    if 0 <= now_s - asked_s < FRESH_S:
        return known
    found = _within_limit(fetch)
    if found is not None:
        known = {plural: _usable(names) for plural, names in found.items()}
        known_s = now_s
    elif now_s - known_s >= USABLE_S:
        known = {}
    _write(file, {"names": known, "known_s": known_s, "asked_s": time.time()})
    return known


def _within_limit(fetch: Callable[[], Names]) -> Names | None:
    """The names, or None after an error or after FETCH_LIMIT_S, whatever blocks."""
    found: list[Names] = []

    def attempt() -> None:
        with contextlib.suppress(
            Exception
        ):  # an error on the screen would break the line that is being typed
            found.append(fetch())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(FETCH_LIMIT_S)
    return found[0] if found else None


def _usable(names: Mapping[str, str]) -> dict[str, str]:
    safe = {name: remark for name, remark in names.items() if _SAFE.fullmatch(name)}
    return dict(list(safe.items())[:NAME_LIMIT])


def _read(file: Path) -> tuple[Names, float, float]:
    """The names, their time, and the time of the last call. Empty and 0: no file, or a damaged one."""
    try:
        content = json.loads(read_settings_file(file))
        names = {
            str(plural): _usable({str(name): str(remark) for name, remark in some.items()})
            for plural, some in content["names"].items()
        }
        return names, float(content["known_s"]), float(content["asked_s"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, 0.0, 0.0


def _write(file: Path, content: Mapping[str, object]) -> None:
    """Replaces the file. A disk without space, or without the right to write, is no error."""
    with contextlib.suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = sorted(file.parent.glob("names-*.json"), key=lambda one: one.stat().st_mtime)
        for old in others[: max(0, len(others) - FILE_LIMIT + 1)]:
            old.unlink(missing_ok=True)
        descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=".names-")
        try:
            with open(descriptor, "w") as stream:
                json.dump(content, stream)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise
