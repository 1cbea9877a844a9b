"""Defects of the worker, put into this process by replacing functions. The product has no hook for them.

The worker's proof by NVML and its search for foreign processes would report these defects at once. The
mutants switch both off: the bytes alone must show the defect.
"""

import enum
from collections.abc import Collection, Sequence
from typing import Any

from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.members import Member
from leasehold_worker.driver.process import TRANSFER_TIMEOUT_S, CheckpointProcess
from leasehold_worker.driver.verification import Verification
from leasehold_worker.leasing.slots import GpuSlots
from leasehold_worker.moves.move import Move
from leasehold_worker.operations.cuda_suspend import CudaSuspend
from leasehold_worker.planning.plan import Plan


class Mutation(enum.StrEnum):
    """A defect of the worker."""

    NONE = "none"
    SKIPPED_REMAP = "skipped-remap"
    """A restore leaves out its GPU pairs, and the new GPUs are reported."""
    EARLY_FREE = "early-free"
    """A suspend frees the GPUs before the checkpoint."""
    STALE_PAIRS = "stale-pairs"
    """A move uses the GPU pairs of the first move."""


def apply(mutation: Mutation) -> None:
    """Puts a defect into the worker of this process."""
    match mutation:
        case Mutation.NONE:
            pass
        case Mutation.SKIPPED_REMAP:
            _replace_pairs(())
        case Mutation.EARLY_FREE:
            _free_before_checkpoint()
        case Mutation.STALE_PAIRS:
            _replace_pairs(None)


def _replace_pairs(pairs: tuple[GpuPair, ...] | None) -> None:
    """Has every move use these pairs, or with None those of the first. Switches off the proof by NVML."""
    original = CheckpointProcess.restore
    first: list[tuple[GpuPair, ...]] = [] if pairs is None else [pairs]

    async def restore(
        self: CheckpointProcess, gpu_pairs: tuple[GpuPair, ...] = (), extra_s: float = TRANSFER_TIMEOUT_S
    ) -> None:
        if gpu_pairs:
            first.append(gpu_pairs)
            gpu_pairs = first[0]
        await original(self, gpu_pairs, extra_s)

    async def prove_nothing(
        _self: Verification, _members: Sequence[Member], _pairs: Sequence[GpuPair]
    ) -> None:
        pass

    CheckpointProcess.restore = restore  # type: ignore[method-assign]
    Verification.prove_placed = prove_nothing  # type: ignore[assignment, method-assign]


def _free_before_checkpoint() -> None:
    """Releases the leases before the members are locked. Switches off the search for foreign processes."""
    original = CudaSuspend._begin
    check_free = GpuSlots.check_free

    async def begin(self: CudaSuspend, plan: Plan, *arguments: Any) -> Move:
        for target in plan.targets:
            if target.workload.lease is not None:
                self._pool.release(target.workload.lease)
        return await original(self, plan, *arguments)

    def check_leases(
        self: GpuSlots,
        gpu_uuids: Sequence[str],
        *,
        allow_foreign: bool = False,
        held: Collection[str] = (),
        is_asleep: bool = False,
    ) -> None:
        check_free(self, gpu_uuids, allow_foreign=True, held=held, is_asleep=is_asleep)

    CudaSuspend._begin = begin  # type: ignore[assignment, method-assign]
    GpuSlots.check_free = check_leases  # type: ignore[method-assign]
