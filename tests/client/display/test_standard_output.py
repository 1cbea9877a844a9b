"""What becomes of a verb whose output goes nowhere: the exit code still tells how the command ended."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leasehold.v1 import command_pb2
from leasehold.v1.command_pb2 import CommandState
from leasehold.v1.enrolment_service_pb2 import CreateJoinTokenResponse, JoinToken
from leasehold.v1.workload_service_pb2 import (
    CreateWorkloadResponse,
    ReadWorkloadOutputResponse,
    UpdateWorkloadResponse,
)
from leasehold_client.contexts import Context, Contexts, locked_contexts

from tests.client.scripted_coordinator import ScriptedCoordinator, command, workload

VERBS = [
    "get gpus",
    "get gpus -o json",
    "suspend one",
    "suspend one -o json",
    "suspend one --no-wait",
    "describe gpu alpha/0",
    "completion bash",
    "version --client",
    "logs one",
]


@pytest.fixture
def coordinator(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """One that has output to read, and where a suspension succeeds."""

    def read(request: Any, context: Any) -> Iterator[ReadWorkloadOutputResponse]:
        yield ReadWorkloadOutputResponse(data=b"count=1\n", next_offset=8)

    scripted.answers |= {
        "ReadWorkloadOutput": read,
        "CreateWorkload": lambda request, context: CreateWorkloadResponse(
            workload=workload("one"), command=command(command_pb2.COMMAND_STATE_PENDING)
        ),
        "UpdateWorkload": lambda request, context: UpdateWorkloadResponse(workload=workload("one")),
        "CreateJoinToken": lambda request, context: CreateJoinTokenResponse(
            join_token=JoinToken(join_token_id="t-1"), ticket="leasehold-join-x"
        ),
    }
    plays(scripted, command_pb2.COMMAND_STATE_SUCCEEDED)
    return scripted


def plays(scripted: ScriptedCoordinator, state: CommandState.ValueType) -> None:
    scripted.plays(command(command_pb2.COMMAND_STATE_PENDING), command(state, 2))


def leasehold(scripted: ScriptedCoordinator, verb: str, stdout: int | None) -> tuple[int, str]:
    """Exit code and standard error of a verb. None: its standard output is closed."""
    command = [sys.executable, "-m", "leasehold_client", *verb.split()]
    done = subprocess.run(
        command if stdout is not None else ["sh", "-c", f"exec {shlex.join(command)} >&-"],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        env={**os.environ, "LEASEHOLD_COORDINATOR": scripted.address},
    )
    return done.returncode, done.stderr


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize("verb", VERBS)
def test_a_reader_that_has_gone_changes_nothing(
    coordinator: ScriptedCoordinator, unread: int, verb: str
) -> None:
    assert leasehold(coordinator, verb, unread) == (0, "")


def test_a_failure_is_told_though_nobody_reads(coordinator: ScriptedCoordinator, unread: int) -> None:
    plays(coordinator, command_pb2.COMMAND_STATE_FAILED)
    code, stderr = leasehold(coordinator, "suspend one -o json", unread)
    assert code == 1
    assert stderr.startswith("leasehold: suspend FAILED")


@pytest.mark.parametrize("verb", VERBS)
def test_a_full_disk_is_one_line(coordinator: ScriptedCoordinator, verb: str) -> None:
    with Path("/dev/full").open("wb") as full:
        code, stderr = leasehold(coordinator, verb, full.fileno())
    stored = "; the request was stored: `leasehold get commands` shows its outcome"
    assert code == 1
    assert stderr == (
        f"leasehold: can't write the output: No space left on device{stored if 'suspend' in verb else ''}\n"
    )


CREATED = (
    "; workload one was created and is not stopped: `leasehold get workload one` shows its state, "
    "`leasehold logs -f one` its output, `leasehold stop one` stops it"
)
REMOVED = ", `leasehold rm workload one` deletes its record after the end"
TOKEN = (
    "; the join token t-1 was created, and its secret is not known any more: delete it by `leasehold token "
    "delete t-1`, and create another one"
)


@pytest.mark.parametrize(
    ("verb", "code", "done"),
    [
        ("run -- count", 1, CREATED),
        ("run -q -- count", 1, CREATED),
        ("run --no-wait -o json -- count", 1, CREATED),
        ("run --attach -- count", 125, CREATED),
        (
            "run --attach --rm -- count",
            125,
            CREATED + REMOVED,
        ),
        ("label workload one a=b", 1, "; the change was made"),
        ("token create --user alice", 1, TOKEN),
    ],
)
def test_a_full_disk_hides_no_change(
    coordinator: ScriptedCoordinator, verb: str, code: int, done: str
) -> None:
    with Path("/dev/full").open("wb") as full:
        assert leasehold(coordinator, verb, full.fileno()) == (
            code,
            f"leasehold: can't write the output: No space left on device{done}\n",
        )


@pytest.mark.parametrize(
    ("verb", "code"),
    [
        ("run -q -- count", 1),
        ("run --attach -- count", 125),
        ("suspend one", 1),
        ("label workload one a=b", 1),
    ],
)
def test_a_closed_output_is_refused_before_any_change(
    coordinator: ScriptedCoordinator, verb: str, code: int
) -> None:
    found, stderr = leasehold(coordinator, verb, None)
    assert (found, stderr.partition(": ")[2].partition(";")[0]) == (
        code,
        "can't write the output: standard output is closed",
    )
    assert not coordinator.requests


def test_a_verb_that_prints_nothing_needs_no_output(coordinator: ScriptedCoordinator) -> None:
    assert leasehold(coordinator, "suspend one -q", None) == (0, "")


@pytest.mark.parametrize(
    "verb",
    ["get gpus", *(pytest.param(verb, marks=pytest.mark.long) for verb in VERBS if verb != "get gpus")],
)
def test_a_closed_output_is_one_line(coordinator: ScriptedCoordinator, verb: str) -> None:
    code, stderr = leasehold(coordinator, verb, None)
    assert code == 1
    assert stderr == (
        "leasehold: can't write the output: standard output is closed; redirect it to a file, or to "
        "/dev/null\n"
    )


@pytest.mark.usefixtures("no_settings")
def test_a_full_disk_hides_no_deleted_context(coordinator: ScriptedCoordinator) -> None:
    with locked_contexts() as keep:
        keep(Contexts("", {"alice": Context("alice", "user/alice", "host:1")}))
    with Path("/dev/full").open("wb") as full:
        assert leasehold(coordinator, "context delete alice", full.fileno()) == (
            1,
            "leasehold: can't write the output: No space left on device; alice: deleted\n",
        )


@pytest.mark.parametrize("output", ["table", "json"])
def test_a_join_token_that_nobody_reads_is_told(
    coordinator: ScriptedCoordinator, unread: int, output: str
) -> None:
    code, stderr = leasehold(coordinator, f"token create --user alice -o {output}", unread)
    assert code == 1
    assert stderr == f"leasehold: can't write the output: the pipe is closed{TOKEN}\n"
