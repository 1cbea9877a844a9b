"""Whether an operation called the driver as often as it says: by the simulated driver's own counts."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from .arena import Arena, Outcome, Stage
from .cases import STEPS, Kind

Counts = Mapping[int, Mapping[str, int]]
"""By process: how often each call of the checkpoint API came for it."""

ONCE: Final[Mapping[Kind, frozenset[str]]] = {
    Kind.SUSPEND: frozenset({"lock", "checkpoint"}),
    Kind.RESTORE: frozenset({"restore", "unlock"}),
    Kind.REMAP: frozenset(STEPS),
    Kind.SWAP: frozenset(STEPS),
}
"""The calls that an operation makes on each of its members, once each, where nothing goes wrong."""


def counts(arena: Arena, stage: Stage) -> Counts:
    """The counts of all members that live."""
    return {process.pid: process.calls for actor in stage.actors for process in arena.live(actor)}


def miscounted(before: Counts, after: Counts, kind: Kind, outcome: Outcome, *, whole: bool) -> Iterator[str]:
    """Calls that were made and not told, told and not made, or made more often than once without need.

    Args:
        before: The counts before the operation.
        after: The counts after it. Members that have died are in neither, and not judged.
        kind: What was asked for.
        outcome: What was told.
        whole: Nothing went wrong, so each call was made once.
    """
    for _, member in outcome.progress.outcomes:
        pid = member.member.identity.pid
        if pid not in before or pid not in after:
            continue
        told = Counter(str(phase.call) for phase in member.phases)
        for call in STEPS:
            made = after[pid][call] - before[pid][call]
            # An unlock that failed is made once more, within the same phase.
            most = 2 * told[call] if call == "unlock" else told[call]
            if not told[call] <= made <= most:
                yield f"{call} of process {pid} was made {made} times, and {told[call]} are told"
            elif whole and made != (call in ONCE[kind]):
                yield f"{call} of process {pid} was made {made} times, and nothing was wrong"
