"""Cordons: GPUs, or the whole worker, out of service for new work, until uncordoned."""

from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Final, final

import trio
from leasehold.v1 import operation_pb2

from leasehold_worker.errors import invalid
from leasehold_worker.gpus.uuids import normalize_uuid
from leasehold_worker.leasing.leases import Cordon
from leasehold_worker.leasing.pool import GpuPool

LOOK_TIMEOUT_S: Final = 12.0
"""Time that a complete reset waits for the next health check: longer than NVML's own timeout."""

REASON_LIMIT: Final = 256
"""Characters of the reason and of the operator's name."""


@final
class Cordons:
    """The operations cordon, uncordon and reset_gpu_health. All GPUs that a request names must exist.

    Args:
        pool: The pool, which stores cordons and health verdicts.
        look: Checks the health of the GPUs.
    """

    def __init__(self, pool: GpuPool, look: Callable[[], Awaitable[None]]) -> None:
        self._pool = pool
        self._look = look

    def cordon(self, operation: operation_pb2.CordonOperation) -> None:
        """Cordons GPUs. A workload keeps its lease, and no new lease is granted.

        Raises:
            OperationError: UNKNOWN_GPU, or INVALID_ARGUMENT without a reason.
        """
        if not operation.reason or len(operation.reason) > REASON_LIMIT:
            raise invalid("reason", f"a cordon needs a reason of 1 to {REASON_LIMIT} characters: give one")
        cordon = Cordon(operation.reason, operation.cordoned_by[:REASON_LIMIT], datetime.now(UTC))
        for gpu_uuid in self._named(operation.gpu_uuids) or [""]:
            self._pool.slots.cordon(gpu_uuid, cordon)

    def uncordon(self, operation: operation_pb2.UncordonOperation) -> None:
        """Uncordons GPUs; those without a cordon stay unchanged.

        Raises:
            OperationError: UNKNOWN_GPU.
        """
        for gpu_uuid in self._named(operation.gpu_uuids) or [""]:
            self._pool.slots.cordon(gpu_uuid, None)

    async def reset_health(self, operation: operation_pb2.ResetGpuHealthOperation) -> None:
        """Clears the health verdicts of GPUs and checks them again, so that a lasting fault is found at once.

        Raises:
            OperationError: UNKNOWN_GPU, or INVALID_ARGUMENT if none is named.
        """
        gpu_uuids = self._named(operation.gpu_uuids)
        if not gpu_uuids:
            raise invalid("gpu_uuids", "the request names no GPU: name the GPUs whose health is to be reset")
        for gpu_uuid in gpu_uuids:
            self._pool.slots.reset_health(gpu_uuid)
        # The change is done: a later failure must not report it as undone.
        with trio.move_on_after(LOOK_TIMEOUT_S, shield=True):
            await self._look()

    def _named(self, gpu_uuids: Iterable[str]) -> list[str]:
        """The GPUs by NVML's UUIDs, after a check that all of them exist."""
        named = [normalize_uuid(gpu_uuid) for gpu_uuid in gpu_uuids]
        return [self._pool.slots.get(gpu_uuid).gpu_uuid for gpu_uuid in named]
