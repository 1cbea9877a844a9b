"""The logs of both daemons as JSON: one story per operation, and no secret at any level."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleets import TIMEOUT_S, Fleet, make_fleet
from tests.integration.test_secret_variables import SECRET

OPTIONS = ("--log-format", "json", "--log-level", "debug")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with make_fleet(tmp_path, *OPTIONS) as started:
        started.start_worker("alpha", settings='log_format = "json"\nlog_level = "debug"\n')
        yield started


def entries(fleet: Fleet, name: str) -> list[dict[str, Any]]:
    """The log of a daemon. Each line must be an object."""
    return [json.loads(line) for line in fleet.log(name).splitlines() if not line.startswith("leasehold ")]


def story(fleet: Fleet, name: str, verb: str) -> list[dict[str, Any]]:
    """The lines of a daemon about an operation."""
    return [entry for entry in entries(fleet, name) if entry.get("verb") == verb]


@pytest.mark.long
def test_each_operation_is_one_story_without_secrets(fleet: Fleet) -> None:
    fleet.run_counter("one")
    fleet.cli("suspend", "one")
    fleet.cli("run", "--name", "two", "--env-secret", "TOKEN", "--", "true", TOKEN=SECRET)
    fleet.cli("restore", "one", "--to", "alpha/0")
    fleet.cli("stop", "one")

    created, ended = story(fleet, "coordinator", "suspend")
    begun, *phases, finished = story(fleet, "alpha", "suspend")
    (session,) = {entry["session"] for entry in entries(fleet, "alpha") if "session" in entry}
    for entry in (created, ended, begun, *phases, finished):
        assert entry["command"] == created["command"]
        assert entry["workload"] == created["workload"]
    assert "suspend created for worker" in created["message"]
    assert "by local/" in created["message"], "the story names the caller"
    assert {phase["phase"] for phase in phases} >= {"preflight", "lock", "checkpoint", "verify"}
    assert {phase["level"] for phase in phases} == {"debug"}
    for entry in (ended, finished):
        assert entry["level"] == "info"
        assert entry["outcome"] == "SUCCEEDED"
        assert entry["duration_s"] > 0
        assert entry["session"] == session
    assert ended["worker"] == "alpha"
    for name in ("coordinator", "alpha"):
        assert SECRET not in fleet.log(name)


@pytest.mark.long
def test_a_command_whose_worker_restarted_has_its_names_and_no_duration(fleet: Fleet) -> None:
    fleet.run_counter("one")
    fleet.end("alpha")
    settings = 'log_format = "json"\nlog_level = "debug"\n'
    fleet.start_worker("alpha", settings=settings, crash_point="phase-verify")
    with fleet.start_verb("suspend", "one") as verb:
        fleet.processes["alpha"].wait(TIMEOUT_S)
        fleet.end("alpha")
        fleet.start_worker("alpha", settings=settings)
        told, _ = verb.communicate(timeout=TIMEOUT_S)
    assert told.splitlines()[0] == "one: suspend done"
    created, ended = story(fleet, "coordinator", "suspend")
    finished = story(fleet, "alpha", "suspend")[-1]
    assert "Duration" not in fleet.cli("describe", "command", created["command"]).stdout
    for entry in (ended, finished):
        assert (entry["command"], entry["workload"]) == (created["command"], created["workload"])
        assert (entry["outcome"], entry["message"]) == ("SUCCEEDED", "suspend SUCCEEDED")
        assert "duration_s" not in entry
    assert finished["epoch"]
    warnings = [entry["message"] for entry in entries(fleet, "coordinator") if entry["level"] == "warning"]
    assert not [message for message in warnings if "ignored an update" in message]
