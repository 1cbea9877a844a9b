"""A coordinator that answers nonsense gets one line said of it, or a "?", and no traceback."""

import os
import re
import subprocess
import sys

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import Command, CommandResult, PhaseTiming
from leasehold.v1.command_service_pb2 import ListCommandsResponse
from leasehold.v1.event_pb2 import Event
from leasehold.v1.fleet_service_pb2 import ListWorkersResponse
from leasehold.v1.operation_pb2 import Operation, SuspendOperation
from leasehold.v1.worker_pb2 import Worker
from leasehold_client.coordinator.client import Client
from leasehold_client.display.record_tables import event_columns
from leasehold_client.display.tables import echo_table
from leasehold_client.errors import LeaseholdError

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator

NEVER, ENDLESS = Timestamp(seconds=2**62, nanos=-1), Duration(seconds=2**62, nanos=-1)
ODD_COMMAND = Command(
    command_id="c-odd",
    state=command_pb2.COMMAND_STATE_SUCCEEDED,
    create_time=NEVER,
    timeout=ENDLESS,
    operation=Operation(suspend=SuspendOperation()),
    result=CommandResult(duration=ENDLESS, phases=[PhaseTiming(phase="lock", duration=ENDLESS)]),
)


@pytest.mark.parametrize("kind", ["workers", "commands"])
def test_a_time_that_no_calendar_has(
    leasehold: CommandLine, scripted: ScriptedCoordinator, kind: str
) -> None:
    scripted.answers["ListWorkers"] = lambda request, context: ListWorkersResponse(
        workers=[Worker(name="alpha", state=99, last_seen_time=NEVER)]  # type: ignore[arg-type]  # newer
    )
    scripted.answers["ListCommands"] = lambda request, context: ListCommandsResponse(commands=[ODD_COMMAND])
    table = leasehold("get", kind)
    assert (table.code, table.stderr) == (0, ""), table
    assert " ? " in table.stdout or table.stdout.splitlines()[1].startswith("? "), table.stdout
    document = leasehold("get", kind, "-o", "json")
    assert (document.code, document.stdout) == (1, ""), document
    assert document.stderr.startswith("leasehold: the answer can't be printed as JSON"), document.stderr
    assert document.stderr.count("\n") == 1, document.stderr


def test_an_operation_of_an_impossible_duration(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.plays(ODD_COMMAND)
    done = leasehold("suspend", "one")
    assert (done.code, done.stderr) == (0, ""), done


def test_an_argument_that_is_no_text(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    for arguments in (["run", "--", "caf\udce9"], ["stop", "caf\udce9"]):
        done = leasehold(*arguments)
        assert (done.code, done.stdout) == (2, ""), done
        assert re.match(
            r"leasehold: (the argument|invalid workload) 'caf\\udce9'( is|:) not valid UTF-8[:;] ",
            done.stderr,
        )
    assert not scripted.requests


def test_a_terminal_without_the_character(scripted: ScriptedCoordinator) -> None:
    scripted.answers["ListWorkers"] = lambda request, context: ListWorkersResponse(
        workers=[Worker(name="alpha", driver_version="580 …")]
    )
    done = subprocess.run(
        [sys.executable, "-m", "leasehold_client", "get", "workers", "-o", "wide"],
        env=os.environ | {"LEASEHOLD_COORDINATOR": scripted.address, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "580 \\u2026" in done.stdout


def test_a_list_without_end(scripted: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leasehold_client.coordinator.connection.PAGE_LIMIT", 5)
    scripted.answers["ListWorkers"] = lambda request, context: ListWorkersResponse(
        workers=[Worker(name="alpha")], next_page_token=request.page_token + "x"
    )
    with Client(scripted.address) as client, pytest.raises(LeaseholdError, match="more than 5 pages"):
        client.workers()


def test_an_event_of_a_newer_release(capsys: pytest.CaptureFixture[str]) -> None:
    event = Event(kind=99, time=NEVER, message="it rained")  # type: ignore[arg-type]  # newer
    echo_table(event_columns({}), [event])
    assert capsys.readouterr().out.splitlines()[1].split(maxsplit=2) == ["?", "99", "it rained"]
