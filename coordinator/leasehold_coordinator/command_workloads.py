"""The workloads of a command. Pure."""

from leasehold.v1.command_pb2 import Command


def workload_ids(command: Command) -> list[str]:
    """Ids of a command's workloads, preempted ones included. A remap may have several; a cordon has none."""
    operation = command.operation
    moved = (move.workload_id for move in operation.remap.moves)
    ids = dict.fromkeys([command.workload_id, *moved, *operation.run.preempt, *operation.restore.preempt])
    return [workload_id for workload_id in ids if workload_id]
