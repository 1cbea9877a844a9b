"""The coordinator's API for Python programs: synchronous, typed, and safe to repeat."""

import uuid
from collections.abc import Sequence
from functools import partial
from typing import final

from leasehold.v1 import command_pb2, fleet_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.fleet_pb2 import ForgetWorkerResponse
from leasehold.v1.workload_pb2 import EvictionPolicy, Hook, Workload, WorkloadSpec

from leasehold_client.coordinator.reader import CALL_TIMEOUT_S, CHECKPOINTS_TIMEOUT_S, Reader
from leasehold_client.messages import Moves, duration, remapping, suspension, waking


@final
class Client(Reader):
    """A connection to one coordinator, which can ask it for changes too.

    Methods raise :class:`LeaseholdError` where it refuses.

    Args:
        address: HOST:PORT of the coordinator.
    """

    def run(
        self,
        spec: WorkloadSpec,
        *,
        name: str = "",
        worker: str = "",
        gpu_uuids: Sequence[str] = (),
        checkpoint_id: str = "",
        timeout_s: float | None = None,
    ) -> tuple[Workload, Command]:
        """Creates a workload, and the command that starts it.

        Args:
            spec: What to start.
            name: What to call it. Empty: made up.
            worker: Where, by id or name. Empty: where most GPUs are free, or where the checkpoint is.
            gpu_uuids: These very GPUs. Empty: those that the pool gives.
            checkpoint_id: Checkpoint that its application begins with. Empty: none.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        request = fleet_pb2.CreateWorkloadRequest(
            request_id=_request_id(),
            name=name,
            spec=spec,
            worker=worker,
            gpu_uuids=gpu_uuids,
            checkpoint_id=checkpoint_id,
            timeout=duration(timeout_s),
        )
        call_timeout_s = CHECKPOINTS_TIMEOUT_S if checkpoint_id else CALL_TIMEOUT_S
        call = partial(self._workloads.CreateWorkload, request, timeout=call_timeout_s)
        response = self._connection.create(call)
        return response.workload, response.command

    def suspend(
        self,
        workload: str,
        *,
        policy: EvictionPolicy | None = None,
        force: bool = False,
        lock_timeout_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Command:
        """Parks a workload; its GPUs are free for others afterwards.

        One that is parked already by a weaker process strategy is parked by the stronger one.

        Args:
            workload: Id or name.
            policy: How. None: as its spec says.
            force: Also where the policy frees nothing, or loses what the workload has computed.
            lock_timeout_s: How long submitted GPU work may take to drain. None: 10 s.
            timeout_s: How long the command may wait and take. None: 10 min.
        """
        request = fleet_pb2.SuspendWorkloadRequest(
            request_id=_request_id(),
            workload=workload,
            operation=suspension(lock_timeout_s, policy, force=force),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.SuspendWorkload, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def suspend_worker(
        self,
        worker: str,
        *,
        policy: EvictionPolicy | None = None,
        force: bool = False,
        lock_timeout_s: float | None = None,
        timeout_s: float | None = None,
    ) -> fleet_pb2.SuspendWorkerResponse:
        """Parks every workload that holds GPUs of a worker, the oldest first.

        Args:
            worker: Id or name.
            policy: As of :meth:`suspend`.
            force: As of :meth:`suspend`.
            lock_timeout_s: As of :meth:`suspend`.
            timeout_s: How long each command may wait and take. None: 10 min.

        Returns:
            The commands in their order, and the workloads that can't be parked with the reasons.
        """
        request = fleet_pb2.SuspendWorkerRequest(
            worker=worker,
            operation=suspension(lock_timeout_s, policy, force=force),
            timeout=duration(timeout_s),
        )
        return self._connection.create(
            partial(self._workloads.SuspendWorker, request, timeout=CALL_TIMEOUT_S)
        )

    def restore(
        self,
        workload: str,
        *,
        gpu_uuids: Sequence[str] = (),
        checkpoint_id: str = "",
        timeout_s: float | None = None,
    ) -> Command:
        """Wakes a parked workload, however it was parked.

        Args:
            workload: Id or name.
            gpu_uuids: GPUs to wake on, in its order. Empty: the same if they are free, else others.
            checkpoint_id: Checkpoint that one which was stopped begins with. Empty: the newest that is whole.
            timeout_s: How long the command may wait and take. None: 10 min.
        """
        request = fleet_pb2.RestoreWorkloadRequest(
            request_id=_request_id(),
            workload=workload,
            operation=waking(gpu_uuids, checkpoint_id),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.RestoreWorkload, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def remap(
        self, moves: Moves, *, lock_timeout_s: float | None = None, timeout_s: float | None = None
    ) -> Command:
        """Moves running workloads to other GPUs of their worker, all or none: so two can swap theirs.

        Args:
            moves: The workloads, and which GPU takes the place of which. GPUs that are not named stay.
            lock_timeout_s: How long submitted GPU work may take to drain. None: 10 s.
            timeout_s: How long the command may wait and take. None: 10 min.
        """
        request = fleet_pb2.RemapWorkloadsRequest(
            request_id=_request_id(),
            operation=remapping(moves, lock_timeout_s),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.RemapWorkloads, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def checkpoint(self, workload: str, *, timeout_s: float | None = None) -> Command:
        """Has the application of a running workload save itself, and go on. Its kernel does that.

        Args:
            workload: Id or name.
            timeout_s: How long the command may wait and take. None: 10 min.
        """
        request = fleet_pb2.CheckpointWorkloadRequest(
            request_id=_request_id(), workload=workload, timeout=duration(timeout_s)
        )
        call = partial(self._workloads.CheckpointWorkload, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def delete_checkpoints(
        self,
        worker: str,
        checkpoint_ids: Sequence[str],
        *,
        force: bool = False,
        timeout_s: float | None = None,
    ) -> Command:
        """Deletes checkpoints on a worker's disk.

        Args:
            worker: Id or name.
            checkpoint_ids: Which, at least one.
            force: Also those that a parked workload needs, which then can't be woken.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        request = fleet_pb2.DeleteCheckpointsRequest(
            request_id=_request_id(),
            worker=worker,
            timeout=duration(timeout_s),
            operation=command_pb2.DeleteCheckpointsOperation(checkpoint_ids=checkpoint_ids, force=force),
        )
        call = partial(self._workloads.DeleteCheckpoints, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def stop(
        self,
        workload: str,
        *,
        grace_s: float | None = None,
        force: bool = False,
        timeout_s: float | None = None,
    ) -> Command:
        """Ends a workload: SIGTERM, and SIGKILL after the grace.

        Args:
            workload: Id or name.
            grace_s: Time between the two. None: 10 s.
            force: Kill processes that were restored even where they can't be suspended first, which can
                hang their host.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        request = fleet_pb2.StopWorkloadRequest(
            request_id=_request_id(),
            workload=workload,
            operation=command_pb2.StopOperation(grace=duration(grace_s), force=force),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.StopWorkload, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def adopt(
        self,
        pid: int,
        *,
        worker: str,
        name: str = "",
        eviction: EvictionPolicy | None = None,
        hooks: Sequence[Hook] = (),
        timeout_s: float | None = None,
    ) -> tuple[Workload, Command]:
        """Takes in a process that runs already, with its descendants, as a workload that leases its GPUs.

        Args:
            pid: Its process id on the worker's host.
            worker: Id or name of the worker.
            name: What to call it. Empty: made up.
            eviction: How it gives up its GPUs. None: weights retained, CUDA suspend.
            hooks: What is called around that, in order.
            timeout_s: How long the command may wait and take. None: 60 s.

        Returns:
            The workload that it becomes, still PENDING, and the command that takes it in.
        """
        request = fleet_pb2.AdoptProcessRequest(
            request_id=_request_id(),
            worker=worker,
            operation=command_pb2.AdoptOperation(name=name, pid=pid, hooks=hooks, eviction=eviction),
            timeout=duration(timeout_s),
        )
        call = partial(self._workloads.AdoptProcess, request, timeout=CALL_TIMEOUT_S)
        response = self._connection.create(call)
        return response.workload, response.command

    def release(self, workload: str, *, timeout_s: float | None = None) -> Command:
        """Lets a workload go that was adopted, or that claimed its GPUs: it runs on, and its lease ends.

        Args:
            workload: Id or name.
            timeout_s: How long the command may wait and take. None: 60 s.

        Raises:
            LeaseholdError: WRONG_STATE where it was started by Leasehold, or is parked.
        """
        request = fleet_pb2.ReleaseWorkloadRequest(
            request_id=_request_id(), workload=workload, timeout=duration(timeout_s)
        )
        call = partial(self._workloads.ReleaseWorkload, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def cordon(
        self,
        worker: str,
        gpu_uuids: Sequence[str] = (),
        *,
        reason: str,
        cordoned_by: str,
        timeout_s: float | None = None,
    ) -> Command:
        """Takes GPUs, or a whole worker, out of service: who has one keeps it, and nobody else gets it.

        Args:
            worker: Id or name.
            gpu_uuids: Its GPUs. Empty: the whole worker, which then starts nothing.
            reason: Why, in 256 characters at most.
            cordoned_by: Who says so, likewise.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        operation = command_pb2.CordonOperation(gpu_uuids=gpu_uuids, reason=reason, cordoned_by=cordoned_by)
        request = fleet_pb2.CordonRequest(
            request_id=_request_id(), worker=worker, operation=operation, timeout=duration(timeout_s)
        )
        return self._connection.create(partial(self._fleet.Cordon, request, timeout=CALL_TIMEOUT_S)).command

    def uncordon(
        self, worker: str, gpu_uuids: Sequence[str] = (), *, timeout_s: float | None = None
    ) -> Command:
        """Puts GPUs, or a whole worker, back into service.

        Args:
            worker: Id or name.
            gpu_uuids: Its GPUs. Empty: the whole worker; GPUs that were cordoned one by one stay so.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        request = fleet_pb2.UncordonRequest(
            request_id=_request_id(),
            worker=worker,
            operation=command_pb2.UncordonOperation(gpu_uuids=gpu_uuids),
            timeout=duration(timeout_s),
        )
        return self._connection.create(partial(self._fleet.Uncordon, request, timeout=CALL_TIMEOUT_S)).command

    def reset_gpu_health(
        self, worker: str, gpu_uuids: Sequence[str], *, timeout_s: float | None = None
    ) -> Command:
        """Forgets what is known against GPUs of a worker. What is still the case is soon found again.

        Args:
            worker: Id or name.
            gpu_uuids: Its GPUs, at least one.
            timeout_s: How long the command may wait and take. None: 60 s.
        """
        request = fleet_pb2.ResetGpuHealthRequest(
            request_id=_request_id(),
            worker=worker,
            operation=command_pb2.ResetGpuHealthOperation(gpu_uuids=gpu_uuids),
            timeout=duration(timeout_s),
        )
        call = partial(self._fleet.ResetGpuHealth, request, timeout=CALL_TIMEOUT_S)
        return self._connection.create(call).command

    def forget_worker(self, worker: str) -> ForgetWorkerResponse:
        """Has the coordinator forget a worker that is not connected, and returns what it knew of it.

        What the worker had not ended counts as FAILED. Nothing on its host changes.

        Args:
            worker: Id or name.

        Raises:
            LeaseholdError: UNKNOWN_WORKER or WORKER_CONNECTED.
        """
        request = fleet_pb2.ForgetWorkerRequest(worker=worker)
        with self._connection.decoded():
            return self._fleet.ForgetWorker(request, timeout=CALL_TIMEOUT_S)

    def cancel(self, command_id: str) -> Command:
        """Asks for a command that has not ended to be cancelled, and returns it as it is then.

        One that was never sent has ended at once. For another its worker decides: :meth:`wait` tells how it
        ended. One that had ended stays as it is.

        Raises:
            LeaseholdError: UNKNOWN_COMMAND, or WORKER_UNAVAILABLE where its worker can't be asked.
        """
        request = fleet_pb2.CancelCommandRequest(command_id=command_id)
        call = partial(self._commands.CancelCommand, request, timeout=CALL_TIMEOUT_S)
        return self._connection.repeated(call).command


def _request_id() -> str:
    return uuid.uuid4().hex
