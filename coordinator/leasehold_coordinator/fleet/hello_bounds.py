"""How often one worker may begin a session. Each hello costs a write, and names up to 2,048 workloads."""

import time
from typing import Final, final

from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.identities import Identity
from leasehold_coordinator.core.allowance import Allowances
from leasehold_coordinator.core.worker_registry import WORKER_LIMIT
from leasehold_coordinator.errors import FleetError

HELLOS_PER_S: Final = 0.25
"""Sessions that one worker may begin per second, in the long run. The back-off of a worker grows to 4 s on
average. A worker whose reports can't be stored also waits 4 s on average."""

HELLO_BURST: Final = 20
"""Sessions that one worker may begin at once, such as in a network that flaps."""


@final
class HelloBounds:
    """The recent sessions of each worker's identity, on whatever connections."""

    def __init__(self) -> None:
        self._hellos = Allowances(HELLOS_PER_S, HELLO_BURST, 2 * WORKER_LIMIT)

    def admit(self, identity: Identity) -> None:
        """Counts the begin of a session.

        Raises:
            FleetError: TOO_MANY_CALLS, with the bound and when to try again.
        """
        now = time.monotonic()
        if wait_s := self._hellos.of(str(identity), now).take(1, now):
            raise FleetError(
                errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
                f"{identity} has begun {HELLO_BURST} sessions in a short time, and may begin one every "
                f"{1 / HELLOS_PER_S:g} s in the long run: its log says why its sessions end",
                retry_after_s=wait_s,
                bound="worker_hellos",
            )
