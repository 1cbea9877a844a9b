"""The request that ``leasehold run`` makes, from options and from a job file."""

from pathlib import Path

import pytest
from leasehold.v1 import command_pb2, workload_service_pb2

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, command, workload

PENDING, RUNNING = command_pb2.COMMAND_STATE_PENDING, command_pb2.COMMAND_STATE_RUNNING


SUCCEEDED, FAILED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_FAILED


def test_run_sends_what_was_asked_for(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(SUCCEEDED))
    scripted.answers["CreateWorkload"] = lambda request, context: workload_service_pb2.CreateWorkloadResponse(
        workload=workload("made-up"), command=command(PENDING)
    )
    options = ["--gpus", "2", "--worker", "alpha", "--env", "WORD=a=b", "--env", "EMPTY="]
    done = leasehold("run", *options, "--", "train", "--gpus", "9", "-o")
    assert done.code == 0
    assert done.stdout.startswith("made-up: ")
    [request] = scripted.asked(workload_service_pb2.CreateWorkloadRequest)
    assert list(request.spec.arguments) == ["train", "--gpus", "9", "-o"]
    assert dict(request.spec.environment) == {"WORD": "a=b", "EMPTY": ""}
    assert request.spec.resources.gpu_count == 2
    assert (request.worker, request.name) == ("alpha", "")
    assert not request.HasField("timeout")


JOB = """
name = "job"
gpus = 2
cpu = "500m"
memory = "1Gi"
priority = 3
workdir = "/data"
command = ["python", "train.py"]
evict = "stop"

[env]
WORD = "from the file"

[labels]
team = "vision"

[[hooks]]
name = "note"
signal = {signal_number = 10}
"""


@pytest.fixture
def creating(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """A coordinator where each workload starts."""
    scripted.plays(command(SUCCEEDED))
    scripted.answers["CreateWorkload"] = lambda request, context: workload_service_pb2.CreateWorkloadResponse(
        workload=workload(request.name or "made-up"), command=command(PENDING)
    )
    return scripted


def test_a_job_file_has_the_values_of_options(
    leasehold: CommandLine, creating: ScriptedCoordinator, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    assert leasehold("run", "-f", str(file)).code == 0
    [request] = creating.asked(workload_service_pb2.CreateWorkloadRequest)
    spec = request.spec
    assert (request.name, list(spec.arguments)) == ("job", ["python", "train.py"])
    assert (spec.resources.gpu_count, spec.resources.cpu_millicores) == (2, 500)
    assert (spec.resources.memory_bytes, spec.priority, spec.working_directory) == (2**30, 3, "/data")
    assert dict(spec.environment) == {"WORD": "from the file"}
    assert dict(request.labels) == {"team": "vision"}
    assert spec.hooks[0].signal.signal_number == 10
    assert spec.eviction.process_strategy


@pytest.mark.parametrize(("cpu", "millicores"), [("2", 2000), ("1.5", 1500), ("'500m'", 500)])
def test_cores_of_a_job_file_are_those_of_the_option(
    leasehold: CommandLine, creating: ScriptedCoordinator, tmp_path: Path, cpu: str, millicores: int
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(f"command = ['x']\ncpu = {cpu}\nmemory = 1024")
    assert leasehold("run", "-f", str(file)).code == 0
    [request] = creating.asked(workload_service_pb2.CreateWorkloadRequest)
    resources = request.spec.resources
    assert (resources.cpu_millicores, resources.memory_bytes) == (millicores, 1024)


def test_options_override_a_job_file(
    leasehold: CommandLine, creating: ScriptedCoordinator, tmp_path: Path
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    options = ["--name", "other", "--gpus", "1", "--env", "A=b", "-f", str(file), "--label", "team=y"]
    assert leasehold("run", *options, "--", "true").code == 0
    [request] = creating.asked(workload_service_pb2.CreateWorkloadRequest)
    assert (request.name, list(request.spec.arguments)) == ("other", ["true"])
    assert request.spec.resources.gpu_count == 1
    assert dict(request.spec.environment) == {"WORD": "from the file", "A": "b"}
    assert dict(request.labels) == {"team": "y"}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("command = ['x']\ngpu_memory = '40 bananas'", "job.toml: gpu_memory: '40 bananas' is not a size"),
        ("command = ['x']\ncpu = 0", "job.toml: cpu: 0 is not a number of cores"),
        ("command = ['x']\nmemory = -1", "job.toml: memory: '-1' is not a size"),
        ("command = ['x']\nprefer = 'best'", "job.toml: prefer: 'best' is not one of"),
        ("command = ['x']\npriority = 3000000000", "job.toml: priority: 3000000000 is not in the range"),
        (
            "command = ['x']\nmemory = 9223372036854775808",
            "memory: '9223372036854775808' is too large: the maximum is 9223372036854775807",
        ),
        ("command = ['x']\nname = ''", "job.toml: name: the value is empty"),
        ("command = []", "job.toml: command: the list is empty: give a program and its arguments"),
        ("name = 'x'", "job.toml has no command: add the key command"),
        ("", "job.toml has no command: add the key command"),
        ("command = ['x']\n[[hooks]]\nnope = 1", "job.toml: hook 0 has the unknown key 'nope'"),
    ],
)
def test_a_wrong_value_of_a_job_file_is_one_line_with_its_key(
    leasehold: CommandLine, creating: ScriptedCoordinator, tmp_path: Path, text: str, match: str
) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    done = leasehold("run", "-f", str(file))
    assert (done.code, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert match in done.stderr
    assert not creating.requests


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("--rm", "--rm needs --attach"),
        ("--attach --no-wait", "leave out --wait-ready, --no-wait and -o"),
        ("--attach -o json", "leave out --wait-ready, --no-wait and -o"),
        ("--label team", "invalid label 'team': write KEY=VALUE"),
        ("--annotation =x", "invalid annotation '=x': write KEY=VALUE"),
        ("--label a=1 --label a=2", "the label 'a' has two values: give one"),
        ("--env A=1 --env A=", "the variable 'A' has two values: give one"),
        ("--preempt one,", "'one,' has an empty name"),
    ],
)
def test_bad_usage(leasehold: CommandLine, creating: ScriptedCoordinator, options: str, match: str) -> None:
    done = leasehold("run", *options.split(), "--", "true")
    assert (done.code, done.stdout) == (125 if "--attach" in options else 2, "")
    assert match in done.stderr
    assert not creating.asked(workload_service_pb2.CreateWorkloadRequest)


def test_a_second_job_file_is_refused(
    leasehold: CommandLine, creating: ScriptedCoordinator, tmp_path: Path
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("command = ['x']")
    done = leasehold("run", "-f", str(tmp_path / "a"), "-f", str(tmp_path / "b"))
    assert done.code == 2
    assert "--file is given more than once: give it once" in done.stderr
    assert not creating.requests


def test_quiet_prints_the_id(leasehold: CommandLine, creating: ScriptedCoordinator) -> None:
    assert leasehold("run", "-q", "--name", "one", "--", "true").stdout == "id-of-one\n"
