"""Each field of a request that names a resource is in the table of methods, and the audit shows it."""

import re
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default as default_pool
from google.protobuf.message import Message
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.operation_pb2 import Move, RemapOperation, RestoreOperation
from leasehold.v1.workload_service_pb2 import RemapWorkloadsRequest, RestoreWorkloadRequest
from leasehold_coordinator.access.methods import NAMES
from leasehold_coordinator.access.named_resources import NAME_LIMIT, NAMED_LIMIT, named_resources
from leasehold_coordinator.server import listeners

NAMING = re.compile(r"(.*_)?(ids?|uuids?|serial|identity|worker|workload|preempt)")
"""Names of fields that sound like the name of a resource."""

UNNAMED = {
    "request_id",
    "workload.worker_id",  # can't be changed
    "operation.hold_id",  # of a suspend: only a worker sets it
    "suspend.hold_id",
    "restore.pairs.old_uuid",  # GPUs beside the workload that has them
    "restore.pairs.new_uuid",
    "remap.moves.pairs.old_uuid",
    "remap.moves.pairs.new_uuid",
    "operation.pairs.old_uuid",
    "operation.pairs.new_uuid",
    "operation.moves.pairs.old_uuid",
    "operation.moves.pairs.new_uuid",
}
"""Fields that sound like a resource, and name none that the audit has to show."""

OF_OTHER_LISTENERS = {"leasehold.v1.JoinService", "leasehold.worker.v1.SessionService"}

BELOW = ("operation", "binding", "workload", "suspend", "restore", "remap", "moves", "pairs")
"""Fields whose messages are searched. Others, such as a specification, name no resource of the fleet."""


def input_of(method: str) -> Descriptor:
    service, name = method.strip("/").split("/")
    assert service.startswith("grpc.") or service in {*listeners.SERVICES, *OF_OTHER_LISTENERS}
    return default_pool().FindServiceByName(service).methods_by_name[name].input_type


def paths(message: Descriptor, within: str = "") -> Iterator[str]:
    """The paths of all texts of a request."""
    for field in message.fields:
        path = f"{within}{field.name}"
        if field.type == FieldDescriptor.TYPE_STRING:
            yield path
        elif field.message_type is not None and field.name in BELOW:
            yield from paths(field.message_type, f"{path}.")


@pytest.mark.parametrize("method", NAMES)
def test_each_field_that_names_a_resource_is_in_the_table(method: str) -> None:
    known = set(paths(input_of(method)))
    rows = {row.partition("/")[2] for row in NAMES[method]}
    assert rows <= known, "a field of the table is gone, or has another name"
    sounds = {path for path in known if NAMING.fullmatch(path.rpartition(".")[2])}
    assert sounds <= rows | UNNAMED


@pytest.mark.parametrize(
    ("method", "request_", "resources"),
    [
        ("RestoreWorkload", RestoreWorkloadRequest(), ()),
        (
            "RestoreWorkload",
            RestoreWorkloadRequest(
                workload="w", operation=RestoreOperation(hold_id="h", preempt=["w", "v"], checkpoint_id="k")
            ),
            ("workload/w", "hold/h", "checkpoint/k"),
        ),
        (
            "RemapWorkloads",
            RemapWorkloadsRequest(
                operation=RemapOperation(
                    moves=[Move(workload_id=name, pairs=[GpuPair(old_uuid="GPU-1")]) for name in "aab"]
                )
            ),
            ("workload/a", "workload/b"),
        ),
        ("StopWorkload", RestoreWorkloadRequest(workload="w" * 1000), (f"workload/{'w' * NAME_LIMIT}",)),
    ],
)
def test_a_requests_resources_are_named(method: str, request_: Message, resources: tuple[str, ...]) -> None:
    assert named_resources(f"/leasehold.v1.WorkloadService/{method}", request_) == resources


def test_a_long_request_names_the_first_resources_only() -> None:
    moves = [Move(workload_id=f"w{number}") for number in range(10_000)]
    request = RemapWorkloadsRequest(operation=RemapOperation(moves=moves))
    assert len(named_resources("/leasehold.v1.WorkloadService/RemapWorkloads", request)) == NAMED_LIMIT
