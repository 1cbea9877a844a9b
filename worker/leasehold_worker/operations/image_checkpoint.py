"""Images of processes on disk, written and restored by CRIU.

The driver has moved device memory into the processes before they are written, and moves it back after they
are restored. So an image is complete, and can be restored on any GPUs of the same kind.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from msgspec import structs

from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.checkpoints.disk_reservations import DiskReservation
from leasehold_worker.checkpoints.image_manifest import ImageSubject
from leasehold_worker.checkpoints.image_store import ImageStore, PartialImage
from leasehold_worker.checkpoints.publication import publish, verify
from leasehold_worker.checkpoints.volume_calls import DELETE_TIMEOUT_S, call_volume, discard_in_time
from leasehold_worker.commands.progress import Progress
from leasehold_worker.crash_points import crash_point
from leasehold_worker.criu.compatibility import ImageHost
from leasehold_worker.criu.dump import dump
from leasehold_worker.criu.obstacles import outside_connections
from leasehold_worker.criu.restore import new_identities, taken_pids
from leasehold_worker.criu.restore import restore as restore_image
from leasehold_worker.criu.support import CriuSupport, image_memory
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.members import Member, find_members
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import ProcessIdentity, wait_ended
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.suspend_memory import SuspendMemory
from leasehold_worker.moves.move import intent_of
from leasehold_worker.moves.settlement import StoredCheckpoint
from leasehold_worker.operations.cuda_suspend import CudaSuspend
from leasehold_worker.operations.exit_monitor import ExitMonitor
from leasehold_worker.operations.termination import Termination
from leasehold_worker.planning.plan import Plan
from leasehold_worker.programs.programs import forget_start
from leasehold_worker.workloads.eviction import CHECKPOINT, DISK
from leasehold_worker.workloads.host_shares import HostShares
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import CHECKPOINTED, RESTORING, RUNNING
from leasehold_worker.workloads.workload import Parked, Workload

logger = logging.getLogger(__name__)


POLL_INTERVAL_S: Final = 0.01
GONE_TIMEOUT_S: Final = 30.0
"""Time for the processes to end after CRIU has killed them."""


@final
class ImageCheckpoint:
    """Writes and restores the processes of one host's workloads.

    Args:
        support: The CRIU of this host.
        store: The images on disk.
        disk: Deletes images that no workload needs.
        host_memory: The ledger of reserved host memory.
        host: The facts that decide whether an image fits this host.
        driver: Finds the CUDA processes among those restored.
        workloads: The registry.
        host_shares: The host resources of the workloads.
        exit_monitor: Notices the end of the workloads.
        cuda_suspend: Suspends members, and restores them on GPUs.
        termination: Ends processes after a failed restore.
        nursery: Runs the task that waits for restored processes.
    """

    def __init__(
        self,
        support: CriuSupport,
        store: ImageStore,
        disk: CheckpointDirectory,
        host_memory: SuspendMemory,
        host: ImageHost,
        driver: Driver,
        workloads: Workloads,
        host_shares: HostShares,
        exit_monitor: ExitMonitor,
        cuda_suspend: CudaSuspend,
        termination: Termination,
        nursery: trio.Nursery,
    ) -> None:
        self._support = support
        self._store = store
        self._disk = disk
        self._host_memory = host_memory
        self._host = host
        self._driver = driver
        self._workloads = workloads
        self._host_shares = host_shares
        self._exit_monitor = exit_monitor
        self._cuda_suspend = cuda_suspend
        self._termination = termination
        self._nursery = nursery

    async def suspend(self, plan: Plan, progress: Progress) -> None:
        """Suspends a workload's processes, writes them to disk, and waits for their end; or rolls that back.

        Raises:
            OperationError: The operation failed and was rolled back, unless the progress reports otherwise.
        """
        async with self._cuda_suspend.suspended(plan, progress) as move:
            move.kept = await self.keep(plan, progress)

    async def keep(self, plan: Plan, progress: Progress) -> StoredCheckpoint:
        """Writes the suspended processes of a workload to disk, and waits for their end.

        A cancellation before the image is complete rolls back: the processes stay suspended, and the image is
        deleted.

        Raises:
            OperationError: CRIU_FAILED, INSUFFICIENT_DISK, or an error of the disk; the processes are alive.
        """
        workload = plan.target.workload
        criu = self._support.require_criu_for(workload)
        processes = await workload.find_processes()
        for obstacle in await self._support.obstacles(processes, suspended=True):
            raise OperationError(errors_pb2.ERROR_REASON_UNSUPPORTED_STATE, obstacle)
        needed = next((need.needed_bytes for need in plan.tiers if need.tier == DISK), None)
        with self._disk.room() as room:
            await call_volume(room.hold, needed or 0, timeout_s=DELETE_TIMEOUT_S)
            partial_image = await call_volume(
                self._store.begin, workload.workload_id, undo=PartialImage.discard
            )
            # The image is final some time before the workload is settled, and other operations run meanwhile.
            self._disk.expect(partial_image.image_id, workload)
            try:
                progress.enter("image")
                intent = intent_of("image", plan, {}, ())
                await progress.intend(structs.replace(intent, checkpoint_id=partial_image.image_id))
                target = plan.target
                subject = self._host.subject(workload, target.home, target.members, processes, criu)
                kept = await self._write(workload, partial_image, subject, room, progress)
            finally:
                partial_image.close()
                await discard_in_time(partial_image.path)
        with trio.CancelScope(shield=True), trio.move_on_after(GONE_TIMEOUT_S):
            for identity in processes:
                await wait_ended(identity)
            pids = [identity.pid for identity in processes]
            while taken_pids(pids):  # noqa: ASYNC110 - nothing tells that their parents have waited for them
                await trio.sleep(POLL_INTERVAL_S)
        progress.checkpoint_id, progress.disk_bytes = kept.checkpoint_id, kept.disk_bytes
        return kept

    async def _write(
        self,
        workload: Workload,
        partial_image: PartialImage,
        subject: ImageSubject,
        room: DiskReservation,
        progress: Progress,
    ) -> StoredCheckpoint:
        """Has CRIU write the processes, and end them once the image is final."""
        kept: list[StoredCheckpoint] = []

        async def commit() -> None:
            # The processes are stopped, and begin no connection any more. Others were refused before.
            look = partial(outside_connections, await workload.find_processes())
            for obstacle in await trio.to_thread.run_sync(look):
                raise OperationError(errors_pb2.ERROR_REASON_UNSUPPORTED_STATE, obstacle)
            image = await publish(self._store, partial_image, subject)
            crash_point("image-final")
            kept.append(StoredCheckpoint(image.manifest.image_id, image.manifest.size_bytes))

        def note_written(size_bytes: int) -> None:
            room.written_bytes = size_bytes
            progress.tell_bytes("image", size_bytes)

        self._exit_monitor.stop(workload)
        try:
            await dump(
                self._support.require_criu(),
                workload.root.pid,
                partial_image.path,
                commit,
                progress=note_written,
            )
        except BaseException as error:
            if not kept:
                self._exit_monitor.watch(workload)
                raise
            with trio.CancelScope(shield=True):
                await self._end_written(workload, kept[0].checkpoint_id, error, progress)
        return kept[0]

    async def _end_written(
        self, workload: Workload, image_id: str, error: BaseException, progress: Progress
    ) -> None:
        """Ends processes that CRIU has written but not ended.

        Raises:
            OperationError: The processes are alive, and the image is deleted.
        """
        progress.warnings.append(f"the image is complete, but CRIU did not end the processes: {error}")
        try:
            await self._termination.end_processes(workload, progress, parked=True)
        except OperationError:
            await self.forget(image_id)
            self._exit_monitor.watch(workload)
            raise

    async def find_kept(self, image_id: str) -> StoredCheckpoint | None:
        """A complete image, as its name tells. None: there is none."""
        try:
            image = await trio.to_thread.run_sync(self._store.find, image_id)
        except OperationError:
            return None
        return StoredCheckpoint(image.manifest.image_id, image.manifest.size_bytes)

    async def forget(self, image_id: str) -> None:
        """Deletes an image that no workload needs."""
        try:
            await call_volume(self._store.delete, image_id, timeout_s=DELETE_TIMEOUT_S)
        except OperationError as error:
            logger.warning("image %s can't be deleted: %s", image_id, error.message)

    async def restore(self, plan: Plan, reserved: Sequence[Lease], progress: Progress) -> None:
        """Restores the processes of a workload from its image, and its members on the reserved GPUs.

        Raises:
            OperationError: The restore failed. No process runs, and the image is unchanged.
        """
        workload = plan.target.workload
        before, parked = workload.members, workload.parked
        if parked is None:
            raise ValueError("a restore needs the record of the suspend")
        self._workloads.set_state(workload, RESTORING)
        try:
            self._host_shares.take(workload)
            with self._host_memory.charged(image_memory(workload), parks=False):
                await self._resume(plan, parked, reserved, progress)
            plan.target.wakes = True
            await self._cuda_suspend.restore(plan, reserved, progress)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.put_back(workload, parked, before, progress)
            raise
        self._exit_monitor.watch(workload)
        await self._disk.clean_up_in_time(workload)

    async def _resume(
        self, plan: Plan, parked: Parked, reserved: Sequence[Lease], progress: Progress
    ) -> None:
        """Has CRIU restore the processes, and finds the members among them."""
        workload = plan.target.workload
        criu = self._support.require_criu_for(workload)
        progress.enter("verify")
        image = await call_volume(self._store.find, parked.checkpoint_id)
        self._host.check(image.manifest, criu)
        await verify(self._store, image, partial(progress.tell_bytes, "verify"))
        intent = structs.replace(intent_of("resume", plan, {}, reserved), checkpoint_id=parked.checkpoint_id)
        await progress.intend(intent)
        progress.enter("resume")
        folder = self._workloads.folder(workload.workload_id)
        group = self._host_shares.group_of(workload)
        await forget_start(folder)
        self._host_shares.limit_memory(workload, sum(parked.device_memory_bytes.values()))
        root = await restore_image(
            criu,
            image.path,
            image.manifest.subject.root_pid,
            image.manifest.pids,
            folder,
            group=group,
            nursery=self._nursery,
        )
        self._workloads.begin_again(workload, root)
        progress.checkpoint_id, progress.disk_bytes = parked.checkpoint_id, image.manifest.size_bytes
        plan.target.members = await self._members(workload, workload.members)
        workload.note_members(plan.target.members)
        self._workloads.report(workload)

    async def _members(self, workload: Workload, before: Sequence[Member]) -> tuple[Member, ...]:
        """The members under their new identities, with the states that the driver reports now.

        Raises:
            OperationError: CRIU_FAILED: the driver does not list a member.
        """
        now = new_identities(member.identity for member in before)
        found = await find_members(self._driver, await workload.find_processes())
        states: Mapping[ProcessIdentity, Member] = {member.identity: member for member in found}
        members: list[Member] = []
        for member in before:
            identity = now.get(member.identity)
            if identity is None or identity not in states:
                raise OperationError(
                    errors_pb2.ERROR_REASON_CRIU_FAILED,
                    f"CRIU restored process {member.identity.pid}, but the driver does not "
                    "list it as using CUDA: check that the driver is the one of the "
                    "checkpoint",
                    {"pid": str(member.identity.pid)},
                )
            members.append(replace(member, identity=identity, state=states[identity].state))
        return tuple(members)

    async def put_back(
        self, workload: Workload, parked: Parked, members: tuple[Member, ...], progress: Progress
    ) -> None:
        """Ends the restored processes of a workload, which is an image again."""
        if workload.state == RUNNING:  # its members were restored, and then something else failed
            self._workloads.set_state(workload, RESTORING)
        try:
            await self._termination.end_processes(workload, progress, parked=True)
        except OperationError as error:
            progress.warnings.append(f"and the restored processes could not be ended: {error.message}")
            self._exit_monitor.watch(workload)
            self._workloads.lose(workload, error)
            return
        self._workloads.release_lease(workload)
        self._host_shares.give_back(workload)
        # After a failed restore, the record may name another strategy.
        self._workloads.settle(workload, CHECKPOINTED, members, parked.by(CHECKPOINT))
