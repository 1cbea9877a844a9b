"""Identities of callers."""

from dataclasses import dataclass
from enum import StrEnum, unique


@unique
class Kind(StrEnum):
    """What an identity stands for."""

    LOCAL = "local"
    """A Unix user of the coordinator's host."""
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Identity:
    """The caller of a call, as its listener established it.

    Attributes:
        kind: What it stands for.
        name: Its name. Empty for a worker: the worker on this host that the hello names.
    """

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"
