"""A coordinator that does what a test says, on a real socket."""

from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import grpc
from google.protobuf import any_pb2, descriptor, duration_pb2, message_factory
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from leasehold.v1 import (
    access_service_pb2,
    audit_service_pb2,
    certificate_service_pb2,
    command_service_pb2,
    enrolment_service_pb2,
    event_service_pb2,
    fleet_service_pb2,
    operation_pb2,
    workload_service_pb2,
)
from leasehold.v1.command_pb2 import Command, CommandState
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import Lease
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import WORKLOAD_STATE_RUNNING, Workload, WorkloadSpec, WorkloadStatus

from tests.channels import server_credentials

Answer = Callable[[Any, grpc.ServicerContext], Any]

A, B, C = (f"GPU-{letter * 8}-0000-0000-0000-000000000000" for letter in "abc")
GPUS = [
    FleetGpu(worker_id="w-1", worker_name="alpha", gpu=Gpu(uuid=A, slot=0), workload_name="one"),
    FleetGpu(worker_id="w-1", worker_name="alpha", gpu=Gpu(uuid=B, slot=1)),
    FleetGpu(worker_id="w-2", worker_name="beta", gpu=Gpu(uuid=C, slot=0)),
]

_METHODS: dict[str, descriptor.MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for file in (
        access_service_pb2,
        fleet_service_pb2,
        workload_service_pb2,
        command_service_pb2,
        event_service_pb2,
        audit_service_pb2,
        certificate_service_pb2,
        enrolment_service_pb2,
    )
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def command(state: CommandState.ValueType, revision: int = 1, **fields: Any) -> Command:
    """A suspension of workload one, in some state."""
    operation = operation_pb2.Operation(suspend=operation_pb2.SuspendOperation())
    return Command(command_id="c-1", state=state, revision=revision, operation=operation, **fields)


def workload(name: str = "one", *gpu_uuids: str) -> Workload:
    """A workload that runs and is ready, on these GPUs."""
    status = WorkloadStatus(
        state=WORKLOAD_STATE_RUNNING,
        lease=Lease(gpu_uuids=gpu_uuids or [A]),
        ready_time=Timestamp(seconds=1_800_000_000),
    )
    return Workload(
        workload_id=f"id-of-{name}", name=name, worker_id="w-1", spec=WorkloadSpec(), status=status
    )


def refuse(
    context: grpc.ServicerContext,
    code: grpc.StatusCode,
    reason: str,
    message: str,
    retry_after_s: float | None = None,
    metadata: Mapping[str, str] = MappingProxyType({"field": "x"}),
) -> None:
    """Ends a call as a coordinator does."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="leasehold.dev", metadata=metadata))
    details = [detail]
    if retry_after_s is not None:
        delay = duration_pb2.Duration(nanos=round(retry_after_s % 1 * 1e9), seconds=int(retry_after_s))
        details.append(any_pb2.Any())
        details[1].Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    status = status_pb2.Status(code=code.value[0], message=message, details=details)
    context.abort_with_status(rpc_status.to_status(status))


@dataclass
class ScriptedCoordinator(grpc.GenericRpcHandler):
    """Answers by method name, and remembers what it was asked. Other methods are unimplemented."""

    address: str = ""
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[Message] = field(default_factory=list)

    def plays(self, *commands: Command) -> None:
        """Suspensions are answered with the first of these, and a watch tells them all."""
        self.answers["SuspendWorkload"] = lambda request, context: (
            workload_service_pb2.SuspendWorkloadResponse(command=commands[0])
        )
        self.answers["WatchCommand"] = lambda request, context: (
            command_service_pb2.WatchCommandResponse(command=current) for current in commands
        )

    def asked(self, kind: type[Message]) -> list[Any]:
        """The requests of one kind."""
        return [request for request in self.requests if isinstance(request, kind)]

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = _METHODS[handler_call_details.method]
        answer = self.answers.get(method.name)
        if answer is None:
            return None

        def remember(request: Message, context: grpc.ServicerContext) -> Any:
            self.requests.append(request)
            return answer(request, context)

        kind = grpc.unary_stream_rpc_method_handler
        if not method.server_streaming:
            kind = grpc.unary_unary_rpc_method_handler
        return kind(
            remember,
            message_factory.GetMessageClass(method.input_type).FromString,
            message_factory.GetMessageClass(method.output_type).SerializeToString,
        )


@contextmanager
def serving() -> Iterator[ScriptedCoordinator]:
    """A coordinator with two workers and the running workload one, which a test may change."""
    scripted = ScriptedCoordinator()
    scripted.answers["ListGpus"] = lambda request, context: fleet_service_pb2.ListGpusResponse(gpus=GPUS)
    scripted.answers["GetWorkload"] = lambda request, context: workload_service_pb2.GetWorkloadResponse(
        workload=workload(request.workload)
    )
    server = grpc.server(futures.ThreadPoolExecutor(12))  # a watch takes a thread
    server.add_generic_rpc_handlers((scripted,))
    scripted.address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', server_credentials())}"
    server.start()
    yield scripted
    server.stop(None).wait(10)
