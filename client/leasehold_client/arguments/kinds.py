"""Kinds of objects that ``get`` and ``describe`` take, with their short names. Pure."""

from dataclasses import dataclass
from typing import Final, final


@final
@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of objects.

    Attributes:
        plural: The name of a list of such objects.
        singular: The name of one object.
        short: A short name. Empty: none.
    """

    plural: str
    singular: str
    short: str = ""

    @property
    def objects(self) -> str:
        """The objects in a sentence, such as "workers"."""
        return "audit entries" if self.plural == "audit" else self.plural


KINDS: Final = (
    Kind("workers", "worker", "wk"),
    Kind("gpus", "gpu"),
    Kind("workloads", "workload", "wl"),
    Kind("checkpoints", "checkpoint", "ckpt"),
    Kind("commands", "command", "cmd"),
    Kind("events", "event", "ev"),
    Kind("audit", "audit"),
)

BY_WORD: Final = {word: kind for kind in KINDS for word in (kind.plural, kind.singular, kind.short) if word}
"""Each kind by each of its names."""

DESCRIBED: Final = tuple(kind for kind in KINDS if kind.plural not in ("events", "audit"))
"""Kinds that ``describe`` takes. Entries of the others have no name."""

LABELLED: Final = frozenset({"workers", "workloads"})
"""Kinds whose objects have labels."""
