"""A scripted coordinator on a real socket, for the client's side of the wire."""

from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status
from leasehold.v1 import fleet_pb2
from leasehold.v1.command_pb2 import Command


@dataclass
class Scripted:
    """What the coordinator does in a test, and what it was asked."""

    address: str = ""
    watch: Callable[[int], Iterator[Command]] | None = None
    """Plays a WatchCommand, given how many came before; ConnectionError breaks the stream."""
    watches: int = 0
    output: bytes = b""
    output_limit: int = 2**20
    """Bytes after which a stream of output breaks."""
    offsets: list[int] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)

    def watch_command(
        self, request: fleet_pb2.WatchCommandRequest, context: grpc.ServicerContext
    ) -> Iterator[fleet_pb2.WatchCommandResponse]:
        assert self.watch is not None
        self.watches += 1
        try:
            for command in self.watch(self.watches - 1):
                yield fleet_pb2.WatchCommandResponse(command=command)
        except ConnectionError:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    def read_output(
        self, request: fleet_pb2.ReadWorkloadOutputRequest, context: grpc.ServicerContext
    ) -> Iterator[fleet_pb2.ReadWorkloadOutputResponse]:
        self.offsets.append(request.offset)
        end = min(request.offset + self.output_limit, len(self.output))
        if request.offset < end:
            data = self.output[request.offset : end]
            yield fleet_pb2.ReadWorkloadOutputResponse(data=data, next_offset=end)
        if end < len(self.output):
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    def suspend(
        self, request: fleet_pb2.SuspendWorkloadRequest, context: grpc.ServicerContext
    ) -> fleet_pb2.SuspendWorkloadResponse:
        self.request_ids.append(request.request_id)
        if request.workload == "missing":
            refuse(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKLOAD", "no workload 'missing'")
        return fleet_pb2.SuspendWorkloadResponse(command=Command(command_id="c-1"))


def refuse(context: grpc.ServicerContext, code: grpc.StatusCode, reason: str, message: str) -> None:
    """Ends a call as a coordinator does."""
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason=reason, domain="leasehold", metadata={"field": "x"}))
    status = status_pb2.Status(code=code.value[0], message=message, details=[detail])
    context.abort_with_status(rpc_status.to_status(status))


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """A coordinator that plays the test's script."""
    script = Scripted()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    watch = grpc.unary_stream_rpc_method_handler(
        script.watch_command,
        fleet_pb2.WatchCommandRequest.FromString,
        fleet_pb2.WatchCommandResponse.SerializeToString,
    )
    read = grpc.unary_stream_rpc_method_handler(
        script.read_output,
        fleet_pb2.ReadWorkloadOutputRequest.FromString,
        fleet_pb2.ReadWorkloadOutputResponse.SerializeToString,
    )
    suspend = grpc.unary_unary_rpc_method_handler(
        script.suspend,
        fleet_pb2.SuspendWorkloadRequest.FromString,
        fleet_pb2.SuspendWorkloadResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler("leasehold.v1.CommandService", {"WatchCommand": watch}),
            grpc.method_handlers_generic_handler(
                "leasehold.v1.WorkloadService", {"ReadWorkloadOutput": read, "SuspendWorkload": suspend}
            ),
        )
    )
    script.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield script
    server.stop(None).wait(10)
