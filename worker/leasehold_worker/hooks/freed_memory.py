"""Verification by NVML that a hook has freed device memory."""

from typing import Final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.errors import OperationError
from leasehold_worker.hooks.context import Turn

FREED_DEADLINE_S: Final = 10.0
"""Time for memory to fall after a hook: SGLang was seen to answer before it had released all (THUDM/slime
pull request 579), and NVML lags behind by a moment."""

LOOK_INTERVAL_S: Final = 0.1
"""Interval of queries of NVML meanwhile."""


async def require_freed(turn: Turn, before: int | None) -> None:
    """Waits until the members hold less device memory than before.

    Any fall suffices here: only the framework knows how much it can free. The memory of a sleeping workload
    is checked before its GPUs are offered to others (:mod:`leasehold_worker.operations.keep_running`).

    Raises:
        OperationError: MEMORY_NOT_FREED: the memory did not fall in time.
    """
    name = turn.hook.name
    after = before
    if before is not None:
        with trio.move_on_after(FREED_DEADLINE_S):
            while True:
                after = await turn.context.measure()
                if after is None or after < before:
                    break
                await trio.sleep(LOOK_INTERVAL_S)
    if before is None or after is None:
        turn.warnings.append(f"hook {name} reports freed memory, and NVML could not confirm it")
        return
    if after >= before:
        raise OperationError(
            errors_pb2.ERROR_REASON_MEMORY_NOT_FREED,
            f"hook {name} succeeded, but NVML still lists {size_text(after)} for the workload "
            f"({size_text(before)} before): check that the server runs with its sleep mode or "
            "memory saver",
            {"hook": name, "bytes_before": str(before), "bytes_after": str(after)},
        )
