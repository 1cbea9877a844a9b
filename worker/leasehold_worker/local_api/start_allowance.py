"""An allowance for workloads that begin on the host, shared among its users. Pure.

The coordinator accepts 8,192 unknown workloads of a worker at once and one per second in the long run, and a
record above 4 KiB counts as several. A worker above that has no session. So the worker refuses workloads of
its users long before.

Each user has a debt in units, which a new workload raises. All debts together fall at a steady rate, which
debtors share equally. A user's debt is at most half of what others leave, so the sum of all debts never
reaches the bound: n greedy users have 1 / (n + 1) of the bound each, and another user may still begin a
workload.
"""

import math
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer

STARTS_BURST: Final = 4_096
"""Bound of the sum of all debts: half of the coordinator's. The other half covers a restart of the worker, or
a hello to a coordinator that has lost its store."""

STARTS_PER_S: Final = 0.75
"""Units by which all debts together fall in a second. The rest of the coordinator's rate covers the growth of
records."""

TRUSTED_PART: Final = 8
"""One part in so many is kept for root and the worker's user."""

UNIT_BYTES: Final = 4_096
"""The coordinator counts a larger record as several."""

GROWTH_BYTES: Final = 1_024
"""Room in a record for what the coordinator and later reports add: owner, times, end."""


def units(record_bytes: int) -> float:
    """The units of a workload, at least those that the coordinator counts.

    Args:
        record_bytes: Size of the worker's record.
    """
    return max(1.0, (record_bytes + GROWTH_BYTES) / UNIT_BYTES)


@final
class StartAllowance:
    """The debts of a host's users.

    Args:
        burst: Bound of the sum of all debts.
        per_s: Units by which all debts together fall in a second.
    """

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._debts: dict[int, float] = {}
        """By user id. Users without a debt are missing."""
        self._noted_s = -math.inf

    def take(self, peer: Peer, amount: float, now_s: float) -> None:
        """Adds a workload to the debt of its user.

        Args:
            peer: The process that begins the workload.
            amount: Its units.
            now_s: The present time, by a monotonic clock.

        Raises:
            OperationError: INSUFFICIENT_RESOURCES: the user has begun too many. The debt is unchanged.
        """
        self.check(peer, amount, now_s)
        self._debts[peer.uid] = self._debts.get(peer.uid, 0.0) + amount

    def check(self, peer: Peer, amount: float, now_s: float) -> None:
        """Raises what :meth:`take` would raise, and takes nothing."""
        self._regain(now_s)
        own = self._debts.get(peer.uid, 0.0)
        others = sum(self._debts.values()) - own
        usable = self._burst if peer.is_trusted else self._burst * (1 - 1 / TRUSTED_PART)
        limit = max(0.0, usable - others) / 2
        if own + amount <= limit:
            return
        # The own debt and half of the others' fall by at least half of the rate together.
        wait_s = math.ceil(2 * (own + amount - limit) / self._per_s)
        raise OperationError(
            errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES,
            f"user {peer.user} has recently begun workloads of {own:.0f} units on this host, and the limit "
            f"is {limit:.0f} now, half of what other users leave (a record of {UNIT_BYTES // 1024} KiB is a "
            f"unit): try again in {wait_s} s",
            {"bound": "host_workloads", "retry_after_s": str(wait_s)},
        )

    def _regain(self, now_s: float) -> None:
        """Reduces the debts by the time since the last call. What small debts leave goes to larger ones."""
        left = max(0.0, now_s - self._noted_s) * self._per_s
        self._noted_s = now_s
        smallest_first = sorted(self._debts.items(), key=lambda each: each[1])
        for number, (uid, debt) in enumerate(smallest_first):
            paid = min(debt, left / (len(smallest_first) - number))
            left -= paid
            self._debts[uid] = debt - paid
            if paid == debt:
                del self._debts[uid]
