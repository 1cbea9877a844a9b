"""Which part of the worker carries out which operation."""

from functools import partial

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.command_pb2 import Command

from leasehold_worker.agent.assembly import Parts
from leasehold_worker.commands.progress import Report
from leasehold_worker.errors import OperationError
from leasehold_worker.operations.stop_restart import STOP_POLICY
from leasehold_worker.planning.durations import Way


async def operate(parts: Parts, command: Command, report: Report) -> None:
    """Carries out what a command says.

    Raises:
        OperationError: It failed, or was refused. UNSUPPORTED_CAPABILITY: this worker does not know it.
    """
    workload_id, operation = command.workload_id, command.operation
    match operation.WhichOneof("kind"):
        case "run":
            await parts.operations.run(workload_id, operation.run, report)
        case "suspend":
            await parts.operations.suspend(workload_id, operation.suspend, report)
            parts.durations.learn(workload_id, report.policy, Way.DOWN, report)
        case "restore":
            parked = parts.workloads.get(workload_id).parked
            await parts.operations.restore(workload_id, operation.restore, report)
            parts.durations.learn(workload_id, parked.policy if parked else None, Way.UP, report)
        case "remap":
            await parts.operations.remap(operation.remap, report)
        case "stop":
            await parts.stopping.stop(workload_id, operation.stop, report)
            await parts.disk.clean_up_in_time(parts.workloads.get(workload_id))
        case "adopt":
            await parts.adopting.adopt(workload_id, operation.adopt, report)
        case "release":
            await parts.adopting.release(workload_id, report)
        case "cordon":
            await trio.lowlevel.checkpoint()
            parts.servicing.cordon(operation.cordon)
        case "uncordon":
            await trio.lowlevel.checkpoint()
            parts.servicing.uncordon(operation.uncordon)
        case "checkpoint":
            await parts.applications.checkpoint(workload_id, report)
            parts.durations.learn(workload_id, STOP_POLICY, Way.DOWN, report)
        case "delete_checkpoints":
            deletion = operation.delete_checkpoints
            delete = partial(parts.disk.delete, deletion.checkpoint_ids, force=deletion.force)
            await trio.to_thread.run_sync(delete)
        case "reset_gpu_health":
            await parts.servicing.reset_health(operation.reset_gpu_health)
        case None:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                "this worker is older than the coordinator and does not know the operation: update it",
            )
