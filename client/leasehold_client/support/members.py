"""The members of the bundle, the notes about what is missing, and their collection within a deadline."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from leasehold_client.errors import LeaseholdError
from leasehold_client.support.redaction import without_secrets

MEMBER_LIMIT_BYTES: Final = 4 * 2**20
"""Most bytes of a member, before compression."""

GRACE_S: Final = 5.0
"""Time beyond the timeout in which a part may report that it has timed out."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file of the archive.

    Attributes:
        name: Its path in the archive.
        what: What it is, in one line.
        content: Its bytes.
    """

    name: str
    what: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Part:
    """A source of one member.

    Attributes:
        name: The name of its member.
        what: What it is, in one line.
        read: Returns the content of the member.
    """

    name: str
    what: str
    read: Callable[[], bytes]


@dataclass(slots=True)
class Bundle:
    """The collected members of an archive.

    Attributes:
        members: The members, in the order of their parts.
        notes: Why a part is missing or incomplete, by its name.
    """

    members: list[Member] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def document(value: object) -> bytes:
    """A JSON document of a member.

    Raises:
        LeaseholdError: It is too large.
    """
    content = json.dumps(value, indent=1, default=str).encode() + b"\n"
    if len(content) > MEMBER_LIMIT_BYTES:
        raise LeaseholdError(f"it has {len(content)} bytes, more than {MEMBER_LIMIT_BYTES}")
    return content


def collect(parts: Sequence[Part], timeout_s: float) -> Bundle:
    """Reads all parts at the same time. A part that fails or hangs becomes a note.

    A thread that hangs is left behind, and ends with the process.

    Args:
        parts: The parts.
        timeout_s: Timeout of each part.
    """
    outcomes: dict[str, bytes | str] = {}

    def read(part: Part) -> None:
        try:
            outcomes[part.name] = part.read()
        except LeaseholdError as error:
            outcomes[part.name] = error.message
        except (OSError, ValueError, RuntimeError) as error:
            outcomes[part.name] = str(error)

    threads = [threading.Thread(target=read, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s + GRACE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    bundle = Bundle()
    for part in parts:
        outcome = outcomes.get(part.name, f"no answer within {timeout_s:g} s")
        if isinstance(outcome, str):
            bundle.notes[part.name] = without_secrets(outcome)
        else:
            bundle.members.append(Member(part.name, part.what, outcome))
    return bundle
