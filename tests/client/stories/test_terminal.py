"""What people see and press: a spinner, Ctrl-C, and a pipe that closes."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from leasehold.v1 import command_pb2, command_service_pb2, workload_service_pb2

from tests.client.scripted_coordinator import ScriptedCoordinator, command

TIMEOUT_S = 20
RUNNING, SUCCEEDED = command_pb2.COMMAND_STATE_RUNNING, command_pb2.COMMAND_STATE_SUCCEEDED


def command_line(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "leasehold_client", *arguments]


@pytest.fixture
def environment(scripted: ScriptedCoordinator, tmp_path: Path) -> dict[str, str]:
    settings = {"LEASEHOLD_COORDINATOR": scripted.address, "XDG_CONFIG_HOME": str(tmp_path), "TERM": "xterm"}
    return {**os.environ, **settings}


def read_terminal(descriptor: int) -> str:
    """Everything until the other side is closed."""
    pieces = []
    try:
        while piece := os.read(descriptor, 65_536):
            pieces.append(piece)
    except OSError:
        pass  # how Linux says that nobody holds the other side any more
    os.close(descriptor)
    return b"".join(pieces).decode()


def test_a_terminal_shows_the_phase_and_the_output_stays_clean(
    scripted: ScriptedCoordinator, environment: dict[str, str]
) -> None:
    scripted.plays(command(RUNNING, 1), command(RUNNING, 2, phase="checkpoint"), command(SUCCEEDED, 3))
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        command_line("suspend", "one", "-o", "json"), stdout=subprocess.PIPE, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = read_terminal(ours)
        assert process.stdout is not None
        document = json.loads(process.stdout.read())
    assert process.returncode == 0
    assert document["state"] == "COMMAND_STATE_SUCCEEDED"
    assert "suspend" in shown


def test_ctrl_c_leaves_the_command_and_names_it(
    scripted: ScriptedCoordinator, environment: dict[str, str]
) -> None:
    watched, ended = threading.Event(), threading.Event()

    def watch(
        request: command_service_pb2.WatchCommandRequest, context: grpc.ServicerContext
    ) -> Iterator[command_service_pb2.WatchCommandResponse]:
        yield command_service_pb2.WatchCommandResponse(command=command(RUNNING))
        watched.set()
        ended.wait(TIMEOUT_S)

    scripted.plays(command(RUNNING))
    scripted.answers["WatchCommand"] = watch
    with subprocess.Popen(
        command_line("suspend", "one"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert watched.wait(TIMEOUT_S)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
        ended.set()
    assert (process.returncode, stdout) == (130, "")
    assert stderr == (
        "leasehold: interrupted; command c-1 continues: `leasehold get commands c-1` shows its state\n"
    )


def test_a_pipe_that_closes_ends_the_logs_quietly(
    scripted: ScriptedCoordinator, environment: dict[str, str]
) -> None:
    def read(
        request: workload_service_pb2.ReadWorkloadOutputRequest, context: grpc.ServicerContext
    ) -> Iterator[workload_service_pb2.ReadWorkloadOutputResponse]:
        offset = 0
        while context.is_active():
            offset += 65_536
            yield workload_service_pb2.ReadWorkloadOutputResponse(
                data=b"x" * 65_535 + b"\n", next_offset=offset
            )

    scripted.answers["ReadWorkloadOutput"] = read
    with subprocess.Popen(
        command_line("logs", "-f", "one"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 0
        assert process.stderr.read() == b""
