"""A creating call whose answer is lost: it is asked for again by the same id, and never done twice."""

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from leasehold.v1 import command_pb2, fleet_service_pb2, worker_pb2, workload_service_pb2
from leasehold.v1.command_pb2 import Command
from leasehold_client import Client, LeaseholdError, NoCoordinatorError
from leasehold_client.coordinator import retry
from leasehold_client.errors import UsageError, decode_error

from tests.channels import server_credentials
from tests.client.scripted_coordinator import A, B, ScriptedCoordinator, command, refuse
from tests.ports import free_port

CALLS = {
    "CreateWorkload": lambda client: client.run(workload_service_pb2.CreateWorkloadRequest().spec),
    "SuspendWorkload": lambda client: client.suspend("one"),
    "RestoreWorkload": lambda client: client.restore("one"),
    "RemapWorkloads": lambda client: client.remap({"one": [(A, B)]}),
    "StopWorkload": lambda client: client.stop("one"),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_lost_answer_is_asked_for_again_by_the_same_id(scripted: ScriptedCoordinator, method: str) -> None:
    def lose_the_first(request: Any, context: grpc.ServicerContext) -> Any:
        if len(scripted.requests) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        kind = method.replace("CreateWorkload", "CreateWorkloadResponse")
        kind = kind if kind.endswith("Response") else f"{kind}Response"
        return getattr(workload_service_pb2, kind)(command=command(command_pb2.COMMAND_STATE_PENDING))

    scripted.answers[method] = lose_the_first
    with Client(scripted.address) as client:
        CALLS[method](client)
    first, second = scripted.requests
    assert first == second
    assert first.request_id  # type: ignore[attr-defined]


def test_a_request_that_is_too_large_is_told_with_the_limit(scripted: ScriptedCoordinator) -> None:
    scripted.answers["CreateWorkload"] = lambda request, context: None  # gRPC refuses the request
    spec = workload_service_pb2.CreateWorkloadRequest().spec
    spec.arguments.append("x" * 5_000_000)
    told = rf"^the request has 50000\d\d bytes, and {scripted.address} takes at most 4194304: shorten"
    with Client(scripted.address) as client, pytest.raises(LeaseholdError, match=told):
        client.run(spec)


def test_a_refusal_is_not_asked_for_again(scripted: ScriptedCoordinator) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.UNAVAILABLE, "WORKER_UNAVAILABLE", "worker alpha is LOST"
    )
    with Client(scripted.address) as client, pytest.raises(LeaseholdError, match="alpha is LOST"):
        client.suspend("one")
    assert len(scripted.requests) == 1


@pytest.mark.usefixtures("short_outages")
def test_a_coordinator_that_goes_away_may_have_stored_it(scripted: ScriptedCoordinator) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: context.abort(
        grpc.StatusCode.UNAVAILABLE, "the connection broke"
    )
    with Client(scripted.address) as client, pytest.raises(NoCoordinatorError) as gone:
        client.suspend("one")
    assert gone.value.is_sent
    assert "the command may have been stored: `leasehold get commands` shows it" in gone.value.message


@pytest.mark.usefixtures("short_outages")
def test_a_coordinator_that_never_answered_has_stored_nothing() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(NoCoordinatorError) as away:
        client.suspend("one")
    assert not away.value.is_sent
    assert "stored" not in away.value.message


def test_a_command_that_was_only_checked_is_not_waited_for(scripted: ScriptedCoordinator) -> None:
    with Client(scripted.address) as client, pytest.raises(UsageError, match="only checked"):
        client.wait(Command())
    assert not scripted.requests


def test_a_call_that_there_is_no_room_for_is_made_again_when_the_coordinator_says(
    scripted: ScriptedCoordinator,
) -> None:
    def refuse_the_first(request: Any, context: grpc.ServicerContext) -> Any:
        if len(scripted.requests) == 1:
            refuse_for_now(context)
        return workload_service_pb2.SuspendWorkloadResponse(
            command=command(command_pb2.COMMAND_STATE_PENDING)
        )

    scripted.answers["SuspendWorkload"] = refuse_the_first
    with Client(scripted.address) as client:
        client.suspend("one")
    assert len(scripted.requests) == 2


def test_a_page_that_there_is_no_room_for_is_asked_for_again(scripted: ScriptedCoordinator) -> None:
    def refuse_the_first(request: Any, context: grpc.ServicerContext) -> Any:
        if len(scripted.requests) == 1:
            refuse_for_now(context)
        return fleet_service_pb2.ListWorkersResponse(workers=[worker_pb2.Worker(name="alpha")])

    scripted.answers["ListWorkers"] = refuse_the_first
    with Client(scripted.address) as client:
        assert [worker.name for worker in client.workers()] == ["alpha"]
    assert len(scripted.requests) == 2


def test_a_coordinator_that_stays_full_is_a_refusal(
    scripted: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "BUSY_LIMIT_S", 0.3)
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse_for_now(context)
    with Client(scripted.address) as client, pytest.raises(LeaseholdError, match="full") as error:
        client.suspend("one")
    assert (error.value.reason, error.value.retry_after_s) == ("TOO_MANY_COMMANDS", 0.05)


def refuse_for_now(context: grpc.ServicerContext) -> None:
    refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_COMMANDS", "it is full", 0.05)


@pytest.mark.parametrize("reason", ["WORKER_UNAVAILABLE", "STORAGE_UNAVAILABLE", "OF_A_NEWER_COORDINATOR"])
def test_a_refusal_with_a_delay_is_asked_for_again(scripted: ScriptedCoordinator, reason: str) -> None:
    def refuse_the_first(request: Any, context: grpc.ServicerContext) -> Any:
        if len(scripted.requests) == 1:
            refuse(context, grpc.StatusCode.UNAVAILABLE, reason, "worker alpha is STALE", 0.05)
        return workload_service_pb2.SuspendWorkloadResponse(
            command=command(command_pb2.COMMAND_STATE_PENDING)
        )

    scripted.answers["SuspendWorkload"] = refuse_the_first
    waits: list[LeaseholdError] = []
    with Client(scripted.address, waits.append) as client:
        client.suspend("one")
    first, second = scripted.requests
    assert first == second
    assert [error.reason for error in waits] == [reason]


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_a_delay_beyond_the_limit_is_not_waited_out(
    scripted: ScriptedCoordinator, code: grpc.StatusCode
) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, code, "WORKER_UNAVAILABLE", "worker alpha is LOST", 60
    )
    with Client(scripted.address) as client, pytest.raises(LeaseholdError, match="alpha is LOST") as error:
        client.suspend("one")
    assert (len(scripted.requests), error.value.retry_after_s) == (1, 60)
    assert not isinstance(error.value, NoCoordinatorError)


def test_a_coordinator_that_is_just_starting_is_waited_for(scripted: ScriptedCoordinator) -> None:
    port = free_port()
    scripted.answers["ListWorkers"] = lambda request, context: fleet_service_pb2.ListWorkersResponse(
        workers=[worker_pb2.Worker(name="alpha")]
    )
    waits: list[LeaseholdError] = []
    server: list[grpc.Server] = []

    def begin(error: LeaseholdError) -> None:
        waits.append(error)
        if not server:
            server.append(grpc.server(ThreadPoolExecutor(1), handlers=[scripted]))
            assert server[0].add_secure_port(f"127.0.0.1:{port}", server_credentials()) == port
            server[0].start()

    with Client(f"127.0.0.1:{port}", begin) as client:
        assert [worker.name for worker in client.workers()] == ["alpha"]
    server[0].stop(None).wait()
    assert isinstance(waits[0], NoCoordinatorError)


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_coordinator_that_accepts_connections_and_does_not_respond(is_secure: bool) -> None:
    """As a stopped process does, whose connections the kernel accepts."""
    options = [("grpc.min_reconnect_backoff_ms", 200)]  # otherwise 20 s
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            grpc.secure_channel(address, grpc.ssl_channel_credentials(), options)
            if is_secure
            else grpc.insecure_channel(address, options)
        ) as channel:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/leasehold.v1.X/Y")
            with pytest.raises(grpc.RpcError) as failed:
                call(b"")
            error = decode_error(failed.value, address)
    assert "(a program listens there, and does not respond): look at its process" in error.message


def test_what_does_not_answer_is_told_in_plain_words() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        quiet = f"127.0.0.1:{silent.getsockname()[1]}"
        for address, timeout_s, told in (
            (quiet, 0.3, "(it did not respond in time): look at its process and its log"),
            (
                f"127.0.0.1:{free_port()}",
                10.0,
                "(connection refused): start one with `leasehold coordinator`",
            ),
        ):
            with grpc.insecure_channel(address) as channel:
                call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/leasehold.v1.X/Y")
                with pytest.raises(grpc.RpcError) as failed:
                    call(b"", timeout=timeout_s)
                error = decode_error(failed.value, address)
            assert isinstance(error, NoCoordinatorError)
            assert f"no coordinator answers at {address} {told}" in error.message
