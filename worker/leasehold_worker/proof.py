"""NVML's word for what the driver reports: a process is listed on the GPUs that it holds, and on no other.

The driver may report success and have done nothing (NVIDIA/cuda-checkpoint issue 53).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.checkpoint.group import Member
from leasehold_worker.errors import OperationError
from leasehold_worker.inventory import Inventory

PROOF_TIMEOUT_S: Final = 5.0
"""NVML lags behind the driver."""

POLL_INTERVAL_S: Final = 0.02

Found = TypeVar("Found")
Listing = Mapping[str, Mapping[int, int | None]]


async def measured(inventory: Inventory, members: Sequence[Member]) -> tuple[Member, ...]:
    """The members with the device memory that NVML lists for them."""
    listing = await trio.to_thread.run_sync(inventory.process_memory)
    return tuple(
        replace(
            member,
            device_memory_bytes={
                gpu_uuid: memory_bytes
                for gpu_uuid, processes in listing.items()
                if (memory_bytes := processes.get(member.identity.pid)) is not None
            },
        )
        for member in members
    )


async def prove_freed(inventory: Inventory, members: Sequence[Member]) -> None:
    """Waits until NVML lists none of the members.

    Raises:
        OperationError: MEMORY_NOT_FREED, one is still listed.
    """

    def listed(listing: Listing) -> list[tuple[str, int]]:
        return [
            (gpu_uuid, member.identity.pid)
            for gpu_uuid, processes in listing.items()
            for member in members
            if member.identity.pid in processes
        ]

    left = await _poll(inventory, listed)
    if left:
        gpu_uuid, pid = left[0]
        raise OperationError(
            errors_pb2.ERROR_REASON_MEMORY_NOT_FREED,
            f"the driver says that process {pid} is checkpointed, but NVML still lists it on {gpu_uuid}",
            {"pid": str(pid), "gpu_uuid": gpu_uuid},
        )


async def prove_placed(inventory: Inventory, members: Sequence[Member], moves: Mapping[str, str]) -> None:
    """Waits until NVML lists every member on the GPUs that it was to get, and on no other.

    Args:
        inventory: NVML.
        members: Measured before they were parked.
        moves: New GPU by old GPU; a GPU that is missing stays.

    Raises:
        OperationError: REMAP_NOT_APPLIED, a member is somewhere else.
    """

    def misplaced(listing: Listing) -> list[tuple[int, set[str], set[str]]]:
        found: list[tuple[int, set[str], set[str]]] = []
        for member in members:
            pid = member.identity.pid
            wanted = {moves.get(gpu_uuid, gpu_uuid) for gpu_uuid in member.device_memory_bytes}
            actual = {gpu_uuid for gpu_uuid, processes in listing.items() if pid in processes}
            if wanted and wanted != actual:
                found.append((pid, wanted, actual))
        return found

    wrong = await _poll(inventory, misplaced)
    if wrong:
        pid, wanted, actual = wrong[0]
        raise OperationError(
            errors_pb2.ERROR_REASON_REMAP_NOT_APPLIED,
            f"the driver says that process {pid} is restored, but NVML lists it on "
            f"{', '.join(sorted(actual)) or 'no GPU'} and not on {', '.join(sorted(wanted))}",
            {"pid": str(pid)},
        )


async def _poll(inventory: Inventory, wrong: Callable[[Listing], list[Found]]) -> list[Found]:
    """Reads NVML until nothing is wrong; what is wrong still at the deadline."""
    deadline = trio.current_time() + PROOF_TIMEOUT_S
    while True:
        found = wrong(await trio.to_thread.run_sync(inventory.process_memory))
        if not found or trio.current_time() >= deadline:
            return found
        await trio.sleep(POLL_INTERVAL_S)
