"""The names of a fleet, for shell completion: the first page of each list."""

from leasehold.v1 import command_service_pb2, fleet_service_pb2, lease_pb2, worker_pb2, workload_service_pb2
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.workload_pb2 import WorkloadState
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub

from leasehold_client.arguments.gpu_names import gpu_place
from leasehold_client.cli.name_cache import FETCH_LIMIT_S, NAME_LIMIT, Names
from leasehold_client.coordinator.connection import Connection
from leasehold_client.messages import command_state, enum_name, operation_name

COMMAND_LIMIT = 100
"""Most commands. Few people look for an older one."""


def look_up_names(address: str, context: str | None, on_behalf_of: str) -> Names:
    """Asks a coordinator for names.

    Raises:
        LeaseholdError: The coordinator refuses, or does not answer.
    """
    connection = Connection(address, lambda error: None, context, on_behalf_of)
    fleet, workloads = FleetServiceStub(connection.channel), WorkloadServiceStub(connection.channel)
    commands = CommandServiceStub(connection.channel)
    workers = connection.read(
        fleet.ListWorkers, fleet_service_pb2.ListWorkersRequest(page_size=NAME_LIMIT), FETCH_LIMIT_S
    )
    gpus = connection.read(
        fleet.ListGpus, fleet_service_pb2.ListGpusRequest(page_size=NAME_LIMIT), FETCH_LIMIT_S
    )
    open_workloads = connection.read(
        workloads.ListWorkloads,
        workload_service_pb2.ListWorkloadsRequest(page_size=NAME_LIMIT),
        FETCH_LIMIT_S,
    )
    newest = connection.read(
        commands.ListCommands, command_service_pb2.ListCommandsRequest(page_size=COMMAND_LIMIT), FETCH_LIMIT_S
    )
    connection.close()
    return {
        "workers": {
            one.name: enum_name(worker_pb2.WorkerState.Name, one.state, "WORKER_STATE_")
            for one in workers.workers
        },
        "gpus": {
            gpu_place(one): enum_name(lease_pb2.SlotState.Name, one.lease.state, "SLOT_STATE_").lower()
            for one in gpus.gpus
        },
        "workloads": {
            one.name: enum_name(WorkloadState.Name, one.status.state, "WORKLOAD_STATE_")
            for one in open_workloads.workloads
        },
        "commands": {
            one.command_id: f"{operation_name(one)} {command_state(one)}" for one in newest.commands
        },
    }
