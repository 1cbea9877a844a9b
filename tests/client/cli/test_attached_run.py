"""``leasehold run --attach``: output, exit codes and signals."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.command_service_pb2 import (
    CancelCommandRequest,
    CancelCommandResponse,
    WatchCommandRequest,
    WatchCommandResponse,
)
from leasehold.v1.workload_pb2 import Exit, Workload
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadResponse,
    DeleteWorkloadRequest,
    DeleteWorkloadResponse,
    ReadWorkloadOutputRequest,
    ReadWorkloadOutputResponse,
    StopWorkloadRequest,
    StopWorkloadResponse,
    WatchWorkloadsResponse,
)
from leasehold_client.cli.program_command import EXIT_REFUSED
from leasehold_client.coordinator import retry

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, command, refuse, workload

PENDING, SUCCEEDED = command_pb2.COMMAND_STATE_PENDING, command_pb2.COMMAND_STATE_SUCCEEDED
TIMEOUT_S = 30


def ended(**cause: int) -> Workload:
    """A workload that has ended with a cause."""
    shown = workload("one")
    shown.status.state = workload_pb2.WORKLOAD_STATE_EXITED
    if cause:
        shown.status.exit.CopyFrom(Exit(**cause))
    return shown


@pytest.fixture
def program(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """A program that prints a line and exits with 7."""
    scripted.plays(command(SUCCEEDED))
    scripted.answers |= {
        "CreateWorkload": lambda request, context: CreateWorkloadResponse(
            workload=workload("one"), command=command(PENDING)
        ),
        "ReadWorkloadOutput": lambda request, context: iter(
            [ReadWorkloadOutputResponse(data=b"count=1\n", next_offset=8)]
        ),
        "WatchWorkloads": lambda request, context: iter([WatchWorkloadsResponse(workload=ended(code=7))]),
        "DeleteWorkload": lambda request, context: DeleteWorkloadResponse(workload=ended(code=7)),
    }
    return scripted


def refused_at_first(times: int, answer: Callable[..., Any]) -> Callable[..., Any]:
    """An answer that is refused at first, since the caller has too many streams."""
    left = [None] * times

    def called(request: Any, context: grpc.ServicerContext) -> Any:
        if left:
            left.pop()
            detail = {"bound": "caller_streams"}
            refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_CALLS", "64 streams", 0.01, detail)
        return answer(request, context)

    return called


@pytest.mark.parametrize("method", ["WatchCommand", "ReadWorkloadOutput", "WatchWorkloads"])
def test_an_attached_run_waits_for_a_place_among_its_callers_streams(
    leasehold: CommandLine, program: ScriptedCoordinator, method: str
) -> None:
    program.answers[method] = refused_at_first(4, program.answers[method])
    done = leasehold("run", "--attach", "--rm", "--", "count")
    assert (done.code, done.stdout.strip(), done.stderr) == (7, "count=1", "")
    assert program.asked(DeleteWorkloadRequest)


def test_a_refused_output_of_an_attached_run_tells_that_the_program_continues(
    leasehold: CommandLine, program: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "OUTAGE_LIMIT_S", 0.05)
    program.answers["ReadWorkloadOutput"] = refused_at_first(10_000, program.answers["ReadWorkloadOutput"])
    done = leasehold("run", "--attach", "--rm", "--", "count")
    assert done.code == EXIT_REFUSED
    assert "64 streams; workload one continues: `leasehold logs -f one` goes on with it" in done.stderr
    assert not program.asked(DeleteWorkloadRequest)


def test_the_output_is_that_of_the_program_and_so_is_the_exit_code(
    leasehold: CommandLine, program: ScriptedCoordinator
) -> None:
    done = leasehold("run", "--attach", "--", "count")
    assert (done.code, done.stdout.strip(), done.stderr) == (7, "count=1", "")
    assert not program.asked(DeleteWorkloadRequest)
    assert leasehold("run", "--attach", "--rm", "--", "count").code == 7
    assert [request.workload for request in program.asked(DeleteWorkloadRequest)] == ["id-of-one"]


def test_the_record_of_a_program_that_never_started_is_deleted_too(
    leasehold: CommandLine, program: ScriptedCoordinator
) -> None:
    program.plays(command(command_pb2.COMMAND_STATE_FAILED))
    assert leasehold("run", "--attach", "--", "count").code == 125
    assert not program.asked(DeleteWorkloadRequest)
    assert leasehold("run", "--attach", "--rm", "--", "count").code == 125
    assert [request.workload for request in program.asked(DeleteWorkloadRequest)] == ["id-of-one"]


@pytest.mark.parametrize("reason", ["WORKLOAD_BUSY", "NOT_PERMITTED"])
def test_the_exit_code_is_that_of_the_program_also_if_its_record_stays_a_while(
    leasehold: CommandLine, program: ScriptedCoordinator, reason: str
) -> None:
    """The command that stopped the program may end a moment after the program."""

    def delete(request: DeleteWorkloadRequest, context: grpc.ServicerContext) -> DeleteWorkloadResponse:
        if len(program.asked(DeleteWorkloadRequest)) == 1:
            refuse(context, grpc.StatusCode.FAILED_PRECONDITION, reason, "not now")
        return DeleteWorkloadResponse(workload=ended(code=7))

    program.answers["DeleteWorkload"] = delete
    done = leasehold("run", "--attach", "--rm", "--", "count")
    assert done.code == 7
    is_again = reason == "WORKLOAD_BUSY"
    assert len(program.asked(DeleteWorkloadRequest)) == (2 if is_again else 1)
    assert done.stderr == ("" if is_again else f"leasehold: not now ({reason})\n")


@pytest.mark.parametrize(("cause", "code"), [({"code": 0}, 0), ({"code": 3}, 3), ({"signal_number": 9}, 137)])
def test_a_signal_is_an_exit_code_as_in_a_shell(
    leasehold: CommandLine, program: ScriptedCoordinator, cause: dict[str, int], code: int
) -> None:
    program.answers["WatchWorkloads"] = lambda request, context: iter(
        [WatchWorkloadsResponse(workload=ended(**cause))]
    )
    assert leasehold("run", "--attach", "--", "count").code == code


@pytest.mark.usefixtures("short_outages")
def test_a_failure_of_leasehold_itself_is_125(
    leasehold: CommandLine, bare_leasehold: CommandLine, program: ScriptedCoordinator
) -> None:
    program.answers["WatchWorkloads"] = lambda request, context: iter(
        [WatchWorkloadsResponse(workload=ended())]
    )
    unknown = leasehold("run", "--attach", "--", "count")
    assert (unknown.code, unknown.stderr) == (125, "leasehold: workload one is EXITED\n")
    program.plays(command(command_pb2.COMMAND_STATE_FAILED))
    program.answers["WatchCommand"] = lambda request, context: iter(())
    program.answers["CreateWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.RESOURCE_EXHAUSTED, "NO_FREE_GPU", "no GPU is free"
    )
    refused = leasehold("run", "--attach", "--", "count")
    assert (refused.code, refused.stderr) == (125, "leasehold: no GPU is free (NO_FREE_GPU)\n")
    assert bare_leasehold("run", "--attach", "--coordinator", "127.0.0.1:1", "--", "count").code == 125


def test_nobody_says_that_a_workload_continues_on_a_lost_host(
    leasehold: CommandLine, program: ScriptedCoordinator
) -> None:
    program.answers["ReadWorkloadOutput"] = lambda request, context: refuse(
        context, grpc.StatusCode.UNAVAILABLE, "WORKER_UNAVAILABLE", "worker alpha is LOST: start it", 60.0
    )
    done = leasehold("run", "--attach", "--", "count")
    assert done.code == EXIT_REFUSED
    assert done.stderr == (
        "leasehold: worker alpha is LOST: start it; `leasehold get workloads one` shows whether workload one "
        "continues (WORKER_UNAVAILABLE)\n"
    )


@pytest.mark.usefixtures("short_outages")
def test_a_workload_continues_without_a_coordinator(
    leasehold: CommandLine, program: ScriptedCoordinator
) -> None:
    program.answers["ReadWorkloadOutput"] = lambda request, context: context.abort(
        grpc.StatusCode.UNAVAILABLE, "gone"
    )
    done = leasehold("run", "--attach", "--", "count")
    assert done.code == 125
    assert done.stderr.endswith("; workload one continues: `leasehold logs -f one` goes on with it\n")


def attached(program: ScriptedCoordinator, config: Path) -> "subprocess.Popen[str]":
    """A process of its own, which gets signals."""
    return subprocess.Popen(
        [sys.executable, "-m", "leasehold_client", "run", "--attach", "--rm", "--", "count"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "LEASEHOLD_COORDINATOR": program.address, "XDG_CONFIG_HOME": str(config)},
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_the_workload_and_the_second_leaves_it(
    program: ScriptedCoordinator, tmp_path: Path, number: signal.Signals
) -> None:
    reading, stopping, left = threading.Event(), threading.Event(), threading.Event()

    def read(
        request: ReadWorkloadOutputRequest, context: grpc.ServicerContext
    ) -> Iterator[ReadWorkloadOutputResponse]:
        yield ReadWorkloadOutputResponse(data=b"up\n", next_offset=3)
        reading.set()
        left.wait(TIMEOUT_S)

    def stop(request: StopWorkloadRequest, context: object) -> StopWorkloadResponse:
        stopping.set()
        return StopWorkloadResponse(command=command(PENDING))

    program.answers |= {"ReadWorkloadOutput": read, "StopWorkload": stop}
    with attached(program, tmp_path) as process:
        assert reading.wait(TIMEOUT_S)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n", "so the signal comes while the output is read"
        process.send_signal(number)
        assert stopping.wait(TIMEOUT_S)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
        left.set()
    assert process.returncode == 130
    assert stderr.splitlines() == [
        "leasehold: stopping one, which is killed after 10 s; Ctrl-C again leaves now",
        "leasehold: left; `leasehold get workloads one` shows its state",
    ]
    assert [request.workload for request in program.asked(StopWorkloadRequest)] == ["id-of-one"]


def test_a_stop_waits_for_another_command_of_the_workload(
    program: ScriptedCoordinator, tmp_path: Path
) -> None:
    left = threading.Event()

    def read(
        request: ReadWorkloadOutputRequest, context: grpc.ServicerContext
    ) -> Iterator[ReadWorkloadOutputResponse]:
        yield ReadWorkloadOutputResponse(data=b"up\n", next_offset=3)
        left.wait(TIMEOUT_S)

    def stop(request: StopWorkloadRequest, context: grpc.ServicerContext) -> StopWorkloadResponse:
        if len(program.asked(StopWorkloadRequest)) == 1:
            refuse(context, grpc.StatusCode.ABORTED, "WORKLOAD_BUSY", "a checkpoint has not ended")
        left.set()
        return StopWorkloadResponse(command=command(PENDING))

    program.answers |= {"ReadWorkloadOutput": read, "StopWorkload": stop}
    program.answers["WatchWorkloads"] = lambda request, context: iter(
        [WatchWorkloadsResponse(workload=ended(signal_number=15))]
    )
    with attached(program, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 143
    assert stderr.splitlines() == [
        "leasehold: stopping one, which is killed after 10 s; Ctrl-C again leaves now",
        "leasehold: the stop waits: a checkpoint has not ended",
    ]
    assert len(program.asked(StopWorkloadRequest)) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("end", [command_pb2.COMMAND_STATE_CANCELLED, SUCCEEDED, None])
def test_a_signal_during_the_start_cancels_it(
    program: ScriptedCoordinator,
    tmp_path: Path,
    number: signal.Signals,
    end: command_pb2.CommandState.ValueType | None,
) -> None:
    watching, cancelled, stopping, over = (threading.Event() for _ in range(4))

    def watch(request: WatchCommandRequest, context: object) -> Iterator[WatchCommandResponse]:
        yield WatchCommandResponse(command=command(command_pb2.COMMAND_STATE_RUNNING))
        watching.set()
        (over if end is None else cancelled).wait(TIMEOUT_S)
        if end is not None:
            yield WatchCommandResponse(command=command(end, 2))

    def cancel(request: CancelCommandRequest, context: object) -> CancelCommandResponse:
        cancelled.set()
        return CancelCommandResponse(command=command(command_pb2.COMMAND_STATE_RUNNING))

    def stop(request: StopWorkloadRequest, context: object) -> StopWorkloadResponse:
        stopping.set()
        return StopWorkloadResponse(command=command(PENDING))

    def read(request: ReadWorkloadOutputRequest, context: object) -> Iterator[ReadWorkloadOutputResponse]:
        stopping.wait(TIMEOUT_S)
        yield ReadWorkloadOutputResponse(data=b"down\n", next_offset=5)

    program.answers |= {
        "WatchCommand": watch,
        "CancelCommand": cancel,
        "StopWorkload": stop,
        "ReadWorkloadOutput": read,
    }
    with attached(program, tmp_path) as process:
        assert watching.wait(TIMEOUT_S)
        process.send_signal(number)
        assert cancelled.wait(TIMEOUT_S)
        if end is None:
            process.send_signal(number)
        _, stderr = process.communicate(timeout=TIMEOUT_S)
        over.set()
    first, second, *_ = stderr.splitlines()
    assert first == "leasehold: cancelling the start of one; Ctrl-C again leaves now"
    assert [request.command_id for request in program.asked(CancelCommandRequest)] == ["c-1"]
    has_started = end == SUCCEEDED
    assert [request.workload for request in program.asked(StopWorkloadRequest)] == ["id-of-one"] * has_started
    assert len(program.asked(DeleteWorkloadRequest)) == (end is not None)
    assert process.returncode == (7 if has_started else 130)
    assert second.startswith(
        {
            SUCCEEDED: "leasehold: one started before its cancellation: stopping one, which is killed after",
            None: "leasehold: left; ",
        }.get(end, "leasehold: suspend CANCELLED")
    )
