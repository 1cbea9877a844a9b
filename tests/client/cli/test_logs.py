"""The output of a workload."""

from collections.abc import Iterator

import grpc
from leasehold.v1 import workload_service_pb2

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, workload


def test_logs_are_printed_byte_by_byte(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    def read(
        request: workload_service_pb2.ReadWorkloadOutputRequest, context: grpc.ServicerContext
    ) -> Iterator[workload_service_pb2.ReadWorkloadOutputResponse]:
        yield workload_service_pb2.ReadWorkloadOutputResponse(data="Grüße\r\n".encode(), next_offset=9)

    scripted.answers["ReadWorkloadOutput"] = read
    done = leasehold("logs", "one")
    assert (done.code, done.stdout.rstrip()) == (0, "Grüße")


def test_a_progress_bar_is_one_line_of_the_last_ones(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    def read(
        request: workload_service_pb2.ReadWorkloadOutputRequest, context: grpc.ServicerContext
    ) -> Iterator[workload_service_pb2.ReadWorkloadOutputResponse]:
        data = b"epoch 1\nepoch 2\n\rstep 1\rstep 2\ndone\n"
        yield workload_service_pb2.ReadWorkloadOutputResponse(data=data, next_offset=len(data))

    found = workload_service_pb2.GetWorkloadResponse(workload=workload("one"))
    scripted.answers |= {"ReadWorkloadOutput": read, "GetWorkload": lambda request, context: found}
    assert leasehold("logs", "one", "--tail", "3").stdout == "epoch 2\n\rstep 1\rstep 2\ndone\n"


def test_the_last_lines_are_read_from_the_end(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    output = b"".join(b"%d %s\n" % (number, b"x" * 1000) for number in range(1000))
    offsets: list[int] = []

    def read(
        request: workload_service_pb2.ReadWorkloadOutputRequest, context: grpc.ServicerContext
    ) -> Iterator[workload_service_pb2.ReadWorkloadOutputResponse]:
        offsets.append(request.offset)
        yield workload_service_pb2.ReadWorkloadOutputResponse(
            data=output[request.offset :], next_offset=len(output)
        )

    found = workload_service_pb2.GetWorkloadResponse(workload=workload("one"))
    scripted.answers |= {"ReadWorkloadOutput": read, "GetWorkload": lambda request, context: found}
    for count, expected in ((3, [-(64 << 10)]), (100, [-(64 << 10), -(2 << 20)])):
        offsets.clear()
        lines = leasehold("logs", "one", "--tail", str(count)).stdout.splitlines()
        assert [line.split()[0] for line in lines] == [str(number) for number in range(1000 - count, 1000)]
        assert offsets == expected
