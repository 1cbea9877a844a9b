"""What people see and press: a spinner, colours, narrow tables, Ctrl-C, and a pipe that closes."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from leasehold.v1 import command_pb2, command_service_pb2, workload_service_pb2
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2 import ListEventsResponse, WatchEventsResponse
from leasehold.v1.watch_pb2 import Bookmark

from tests.client.scripted_coordinator import ScriptedCoordinator, command, workload

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


def shown_on_terminal(environment: dict[str, str], columns: int, *arguments: str) -> list[str]:
    """The lines that a terminal of so many columns gets."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    variables = {name: text for name, text in environment.items() if name not in ("COLUMNS", "LINES")}
    with subprocess.Popen(
        command_line(*arguments), stdout=theirs, stderr=subprocess.PIPE, env=variables
    ) as process:
        os.close(theirs)
        shown = read_terminal(ours)
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0
    return shown.splitlines()


@pytest.fixture
def long_name(scripted: ScriptedCoordinator) -> str:
    """The name of the only workload."""
    name = "a-name-that-nobody-should-have-to-type-on-a-narrow-terminal"
    listed = workload(name)
    listed.owner = "service/one-of-many-batch-systems"
    scripted.answers["ListWorkloads"] = lambda request, context: workload_service_pb2.ListWorkloadsResponse(
        workloads=[listed]
    )
    return name


@pytest.mark.parametrize("columns", [40, 60, 80, 120, 200])
def test_no_line_of_a_table_is_wider_than_the_terminal(
    environment: dict[str, str], long_name: str, columns: int
) -> None:
    headings, row = shown_on_terminal({**environment, "NO_COLOR": "1"}, columns, "get", "workloads")
    assert len(row) <= columns
    assert "RUNNING" in row
    assert headings.startswith("NAME")
    assert (long_name in row) == (columns >= 200)
    wide = shown_on_terminal({**environment, "NO_COLOR": "1"}, columns, "get", "workloads", "-o", "wide")
    assert long_name in wide[1]


def test_a_terminal_has_colours_unless_the_user_says_no(environment: dict[str, str], long_name: str) -> None:
    variables = {name: text for name, text in environment.items() if name != "NO_COLOR"}
    assert "\x1b[32mRUNNING\x1b[0m" in shown_on_terminal(variables, 200, "get", "workloads")[1]
    for setting in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        assert "\x1b" not in "".join(shown_on_terminal({**variables, **setting}, 200, "get", "workloads"))


def test_a_pipe_gets_whole_cells_without_colours(environment: dict[str, str], long_name: str) -> None:
    done = subprocess.run(
        command_line("get", "workloads"),
        capture_output=True,
        text=True,
        env={**environment, "COLUMNS": "40"},
        timeout=TIMEOUT_S,
    )
    assert long_name in done.stdout
    assert "service/one-of-many-batch-systems" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.long
def test_a_pipe_that_closes_ends_a_stream_of_events(
    scripted: ScriptedCoordinator, environment: dict[str, str]
) -> None:
    def watch(request: object, context: grpc.ServicerContext) -> Iterator[WatchEventsResponse]:
        yield WatchEventsResponse(bookmark=Bookmark(snapshot_end=True))
        number = 0
        while context.is_active():
            number += 1
            yield WatchEventsResponse(event=Event(event_id=str(number), message="x" * 1000))

    scripted.answers |= {"WatchEvents": watch, "ListEvents": lambda request, context: ListEventsResponse()}
    for line in ("events -f --tail 0", "events -f --tail 0 -o json", "get events --watch"):
        with subprocess.Popen(
            command_line(*line.split()), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline()
            process.stdout.close()
            assert process.wait(TIMEOUT_S) == 0
            assert process.stderr.read() == b""
