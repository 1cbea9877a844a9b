"""The habits of the command line, on a real fleet: selectors, waits, attached runs, events, completion."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost

from tests.completion import PATIENT
from tests.prefork import COMMAND_LINE, run

from .fleets import LEASEHOLD, TIMEOUT_S, Fleet

CODES = "\x1b]0;owned\x07\r"


@pytest.mark.parametrize(
    "arguments",
    [
        ["worker", "--config", CODES],
        ["doctor", "--config", CODES],
        ["backup", "create", "--config", CODES, "backup.tar.gz"],
        ["backup", "restore", f"/{CODES}/backup.tar.gz"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_path_has_no_power_over_the_terminal(arguments: list[str], tmp_path: Path) -> None:
    host = SimulatedHost.create(tmp_path / "host", gpus=1, chip="H100")
    env = host.environment() | {"XDG_STATE_HOME": str(tmp_path)}
    done = run(COMMAND_LINE, arguments, env=env, timeout=TIMEOUT_S)
    assert done.returncode in (1, 2)
    printed = done.stdout + done.stderr
    assert r"\x1b]0;owned\x07\r" in printed
    assert printed.replace("\n", "").isprintable()


@pytest.mark.long
def test_several_workloads_are_chosen_by_labels(fleet: Fleet) -> None:
    for name, labels in (("one", ["team=a"]), ("two", ["team=a", "tier=dev"]), ("three", [])):
        options = [word for label in labels for word in ("--label", label)]
        fleet.cli("run", "--name", name, *options, "--", "sleep", "600")

    def listed(*options: str) -> list[str]:
        return sorted(fleet.cli("get", "workloads", "-o", "name", *options).stdout.split())

    assert listed("-l", "team=a") == ["one", "two"]
    assert listed("-l", "team=a,!tier") == ["one"]
    assert listed("-l", "team!=a") == ["three"]
    assert listed("-l", "tier in (dev, test)") == ["two"]
    assert listed("-l", "team notin (a)") == ["three"]
    assert fleet.cli("get", "workload", "one", "-q").stdout.startswith("w-")

    stopped = fleet.cli("stop", "-l", "team=a", "--yes").stdout
    assert sorted(line.split(":")[0] for line in stopped.splitlines() if ": stop" in line) == ["one", "two"]
    assert listed() == ["three"]
    fleet.cli("stop", "three")
    fleet.cli("wait", "one", "two", "three", "--for=ended")
    deleted = fleet.cli("rm", "workload", "--all", "--yes").stdout
    assert sorted(line.split(":")[0] for line in deleted.splitlines()) == ["one", "three", "two"]
    assert listed("--all") == []


@pytest.mark.long
def test_everything_is_suspended_and_restored_by_one_line_each(fleet: Fleet) -> None:
    for name in ("one", "two"):
        fleet.run_counter(name)
    fleet.cli("suspend", "--all")
    fleet.cli("wait", "one", "two", "--for=state=SUSPENDED", "--timeout", "30")
    assert fleet.leases() == {}
    assert fleet.cli("restore", "--all", "--dry-run").stdout.count("restore would move") == 2
    fleet.cli("restore", "--all")
    for name in ("one", "two"):
        fleet.wait_counting(name)
    description = fleet.cli("describe", "workload", "one").stdout
    assert "State:  " in description
    assert "alpha/" in description
    assert "suspend" in description


def test_an_attached_run_is_like_the_program_itself(fleet: Fleet) -> None:
    script = "import os, sys; print(os.environ['WORD'], flush=True); sys.exit(7)"
    attached = ["run", "--attach", "--rm", "--name", "seven", "--env", "WORD=hello"]
    done = fleet.cli(*attached, "--", sys.executable, "-c", script, code=7)
    assert (done.stdout, done.stderr) == ("hello\n", "")
    assert fleet.cli("get", "workloads", "--all", "-q").stdout == ""
    killed = "import os; os.kill(os.getpid(), 9)"
    fleet.cli("run", "--attach", "--", sys.executable, "-c", killed, code=137)
    refused = fleet.cli("run", "--attach", "--gpus", "64", "--", "true", code=125)
    assert "NO_FREE_GPU" in refused.stderr


@pytest.mark.long
def test_ctrl_c_stops_an_attached_run(fleet: Fleet) -> None:
    script = "import time; print('up', flush=True); time.sleep(600)"
    attached = ["run", "--attach", "--name", "sleeper", "--", sys.executable, "-c", script]
    with fleet.start_verb(*attached) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "EXITED(signal 15)" in fleet.cli("get", "workload", "sleeper").stdout


@pytest.mark.long
def test_the_last_lines_are_followed_without_a_gap(fleet: Fleet) -> None:
    script = "import time\nfor number in range(1000): print(number, flush=True)\ntime.sleep(1)\nprint('end')"
    fleet.cli("run", "--name", "counting", "--", sys.executable, "-c", script)
    fleet.wait(lambda: b"999\n" in b"".join(fleet.client.output("counting")))
    assert fleet.cli("logs", "counting", "--tail", "2").stdout.splitlines()[:2] in (
        ["998", "999"],
        ["999", "end"],
    )
    followed = fleet.cli("logs", "counting", "--tail", "1000", "-f").stdout.splitlines()
    assert followed[-2:] == ["999", "end"]
    assert followed == [str(number) for number in range(1001 - len(followed), 1000)] + ["end"]
    assert fleet.cli("logs", "counting", "--tail", "0").stdout == ""


@pytest.mark.long
def test_events_are_followed(fleet: Fleet) -> None:
    with fleet.start_verb("events", "-f", "--tail", "1000") as events:
        assert events.stdout is not None
        assert any("WORKER_CONNECTED" in line for line in events.stdout)  # enrolled ones have joined before
        fleet.cli("run", "--name", "short", "--", "true")
        for line in events.stdout:
            if "workload short is EXITED" in line:
                break
        events.send_signal(signal.SIGINT)
        events.communicate(timeout=TIMEOUT_S)
    assert events.returncode == 130
    earlier = fleet.cli("events", "short", "--since", "1h").stdout
    assert "workload short is EXITED" in earlier
    assert "WORKER_CONNECTED" not in earlier
    assert fleet.cli("events", "--worker", "alpha", "--filter", "kind = CORDON").stdout == ""


@pytest.mark.long
def test_the_versions_of_both_sides_are_equal(fleet: Fleet) -> None:
    sides = fleet.json("version")
    assert sides["client"]["version"] == sides["coordinator"]["version"]
    wide = fleet.cli("get", "workers", "--columns", "name,version").stdout
    assert sides["client"]["version"] in wide


@pytest.mark.long
def test_a_frozen_coordinator_completes_from_the_file(fleet: Fleet, tmp_path: Path) -> None:
    fleet.cli("run", "--name", "sleeper", "--", "sleep", "600")

    def completed(words: str, program: Sequence[str] = PATIENT) -> str:
        variables = {
            **fleet.variables,
            "XDG_CACHE_HOME": str(tmp_path),
            "_LEASEHOLD_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        }
        return fleet_completion(variables, program)

    assert completed("leasehold stop s") == "plain,sleeper"
    assert completed("leasehold get gpus alpha/3") == "plain,alpha/3"
    coordinator = fleet.processes["coordinator"]
    coordinator.send_signal(signal.SIGSTOP)
    try:
        assert completed("leasehold stop s", LEASEHOLD) == "plain,sleeper"
    finally:
        coordinator.send_signal(signal.SIGCONT)
    fleet.cli("stop", "sleeper")


def fleet_completion(variables: dict[str, str], program: Sequence[str]) -> str:
    """What the program answers a shell. Nothing may be printed to standard error."""
    done = subprocess.run(
        program, env={**os.environ, **variables}, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()
