"""Retries of hooks that failed after a restore, while the workload runs."""

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, operation_pb2
from leasehold.v1.operation_pb2 import Operation
from leasehold.worker.v1.session_pb2 import CommandUpdate

from leasehold_worker.workloads.workload import Workload

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 1.0
WAITS_S: Final = (5.0, 10.0, 20.0, 40.0, 80.0, 160.0)
"""Waits before the attempts. After the last one only `leasehold wake` calls the hooks again."""


@final
class HookRetries:
    """Calls the remaining hooks of running workloads again.

    Args:
        workloads: The workloads of the worker.
        carry_out: Runs a command of the worker itself.
    """

    def __init__(
        self,
        workloads: Callable[[], Iterable[Workload]],
        carry_out: Callable[[str, Operation], Awaitable[CommandUpdate]],
    ) -> None:
        self._workloads = workloads
        self._carry_out = carry_out
        self._in_hand: set[str] = set()

    async def run(self) -> None:
        """Retries until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                for workload in self._workloads():
                    if workload.is_half_awake and workload.workload_id not in self._in_hand:
                        self._in_hand.add(workload.workload_id)
                        nursery.start_soon(self._see_to, workload)
                await trio.sleep(LOOK_INTERVAL_S)

    async def _see_to(self, workload: Workload) -> None:
        try:
            await self._try_again(workload)
        except Exception:
            logger.exception("a defect prevents the calls of the hooks of workload %s", workload.name)
        while workload.is_half_awake:  # noqa: ASYNC110 - a look now and then is enough
            await trio.sleep(LOOK_INTERVAL_S)
        self._in_hand.discard(workload.workload_id)

    async def _wake(self, workload: Workload) -> CommandUpdate | None:
        """Restores the workload once no other command runs. None: another one restored or suspended it."""
        operation = Operation(restore=operation_pb2.RestoreOperation())
        while workload.is_half_awake:
            outcome = await self._carry_out(workload.workload_id, operation)
            if outcome.error.reason != errors_pb2.ERROR_REASON_WORKLOAD_BUSY:
                return outcome
            await trio.sleep(LOOK_INTERVAL_S)
        return None

    async def _try_again(self, workload: Workload) -> None:
        for wait_s in WAITS_S:
            await trio.sleep(wait_s)
            outcome = await self._wake(workload)
            if outcome is None:
                return
            if not outcome.HasField("error"):
                logger.info("workload %s: its hooks succeeded", workload.name)
                return
            logger.warning("workload %s: its hooks failed again: %s", workload.name, outcome.error.message)
        logger.error(
            "workload %s: no more retries of its hooks: call them with `leasehold wake`", workload.name
        )
