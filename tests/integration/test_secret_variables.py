"""Secret variables of a workload: the program has them, and nothing else that is stored, told or logged."""

import sys
from pathlib import Path

import pytest
from leasehold.v1 import command_pb2
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_client.errors import LeaseholdError

from tests.integration.fleets import Fleet

SECRET = "value-that-nobody-may-find-5c1e"
OTHER = "second-value-of-a-file-77aa"
SHOW = """
import os, time
print(len(os.environ["TOKEN"]), os.environ["FROM_FILE"][:6], flush=True)
time.sleep(1000)
"""


def forms(value: str) -> list[bytes]:
    """A value as it would appear in a file: as text, and as the hexadecimal of a journal."""
    return [value.encode(), value.encode().hex().encode()]


def require_nowhere(folder: Path, *texts: str) -> None:
    """Checks that no file of a test and no answer has a secret value."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name != "secret.txt":
            content = path.read_bytes()
            for value in (SECRET, OTHER):
                for form in forms(value):
                    assert form not in content, path
    for text in texts:
        assert SECRET not in text
        assert OTHER not in text


def answers(fleet: Fleet) -> list[str]:
    """What the coordinator tells of workloads, commands, events and the audit."""
    verbs = [("get", "workloads", "-a"), ("get", "commands"), ("get", "events"), ("get", "audit")]
    return [fleet.cli(verb, *options, "-o", "json").stdout for verb, *options in verbs]


@pytest.mark.long
def test_a_value_reaches_the_program_and_nothing_else(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text(f"{OTHER}\n")
    secrets = ["--env-secret", "TOKEN", "--env-secret", f"FROM_FILE=@{tmp_path}/secret.txt"]
    options = ["--name", "one", *secrets, "--", sys.executable, "-c", SHOW]
    said = fleet.cli("run", *options, TOKEN=SECRET)
    fleet.wait(lambda: b"\n" in b"".join(fleet.client.output("one")))
    assert b"".join(fleet.client.output("one")).decode() == f"{len(SECRET)} {OTHER[:6]}\n"
    told = fleet.json("get", "workloads", "one")
    assert {"TOKEN", "FROM_FILE"} <= set(str(told).replace("'", " ").split())
    logs = [fleet.log("coordinator"), fleet.log("alpha")]
    require_nowhere(tmp_path, said.stdout, said.stderr, *answers(fleet), *logs)
    fleet.end("alpha")
    fleet.start_worker("alpha")  # its hello tells of the workload again
    fleet.cli("stop", "one")
    require_nowhere(tmp_path, *answers(fleet), fleet.log("alpha"))


@pytest.mark.long
def test_a_command_that_waits_keeps_its_values_across_a_restart(empty_fleet: Fleet, tmp_path: Path) -> None:
    """The worker dies when it receives the command, and the coordinator restarts: both come again."""
    fleet = empty_fleet
    fleet.start_worker("alpha", crash_point="command-received")
    spec = WorkloadSpec(
        arguments=[sys.executable, "-c", SHOW], secret_environment={"TOKEN": SECRET, "FROM_FILE": OTHER}
    )
    workload, command = fleet.client.run(spec, name="one", request_id="r-1")
    assert dict(workload.spec.secret_environment) == {"TOKEN": "", "FROM_FILE": ""}
    assert dict(command.operation.run.spec.secret_environment) == {"TOKEN": "", "FROM_FILE": ""}
    fleet.processes["alpha"].wait(30)
    fleet.end("alpha")
    fleet.kill_coordinator()
    require_nowhere(tmp_path)
    fleet.start_coordinator()
    fleet.client.run(spec, name="one", request_id="r-1")  # the same request, recognised by its digest
    spec.secret_environment["TOKEN"] = "another"
    with pytest.raises(LeaseholdError) as raised:
        fleet.client.run(spec, name="one", request_id="r-1")
    assert raised.value.reason == "REQUEST_ID_REUSED"
    fleet.start_worker("alpha")
    assert fleet.client.wait(command).state == command_pb2.COMMAND_STATE_SUCCEEDED
    fleet.wait(lambda: b"\n" in b"".join(fleet.client.output("one")))
    assert b"".join(fleet.client.output("one")).decode() == f"{len(SECRET)} {OTHER[:6]}\n"
    require_nowhere(tmp_path, *answers(fleet))
    fleet.cli("stop", "one")


@pytest.mark.long
def test_what_is_refused(fleet: Fleet, tmp_path: Path) -> None:
    program = ["--", "true"]
    fleet.refuse("run", "--env-secret", "NOT_SET_HERE", *program, code=2, match="not set in this environment")
    fleet.refuse("run", "--env-secret", f"TOKEN={SECRET}", *program, code=2, match="NAME=@FILE")
    fleet.refuse("run", "--env-secret", f"TOKEN=@{tmp_path}/none", *program, code=2, match="can't be read")
    both = ["--env", "HOME=/", "--env-secret", "HOME"]
    fleet.refuse("run", *both, *program, code=2, match="in secret_environment: give it once")
