"""``leasehold describe``: the fields of each kind, escaped, with times that have a zone."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import command_pb2, event_pb2, worker_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import GetCommandResponse, ListCommandsResponse
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2 import ListEventsResponse
from leasehold.v1.eviction_pb2 import PROCESS_STRATEGY_STOP
from leasehold.v1.fleet_service_pb2 import GetWorkerResponse, ListWorkersResponse
from leasehold.v1.operation_pb2 import CordonOperation
from leasehold.v1.worker_pb2 import Capability, FleetGpu, Worker
from leasehold.v1.workload_service_pb2 import GetWorkloadResponse, ListWorkloadsResponse
from leasehold_client.display.descriptions import describe_gpu

from tests.client.checkpoints import MADE, serve
from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import A, ScriptedCoordinator, command, workload

ALPHA = Worker(
    worker_id="w-1",
    name="alpha",
    state=worker_pb2.WORKER_STATE_CONNECTED,
    capabilities=[
        Capability(name="gpu_remap", reason="needs driver 580\n\x1b[31m"),
        Capability(name="\x1b[2J\n"),
    ],
)


@pytest.fixture
def fleet(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """A worker with a workload, a command and an event."""
    shown = workload("one")
    shown.create_time.FromSeconds(1_700_000_000)
    shown.labels["team"] = "vision"
    shown.annotations["note"] = "a\nb\tc"
    shown.spec.arguments.extend(["python", "train\x1b.py"])
    shown.spec.secret_environment["KEY"] = ""
    member = shown.status.members.add(pid=7, state=workload_pb2.MEMBER_STATE_RUNNING)
    member.device_memory_bytes[shown.status.lease.gpu_uuids[0]] = 2**20
    serve(scripted, *MADE)
    scripted.answers |= {
        "GetWorkload": lambda request, context: GetWorkloadResponse(workload=shown),
        "GetWorker": lambda request, context: GetWorkerResponse(worker=ALPHA),
        "ListWorkers": lambda request, context: ListWorkersResponse(workers=[ALPHA]),
        "ListWorkloads": lambda request, context: ListWorkloadsResponse(workloads=[shown]),
        "GetCommand": lambda request, context: GetCommandResponse(
            command=command(command_pb2.COMMAND_STATE_RUNNING, workload_id="id-of-one", actor="local/ann")
        ),
        "ListCommands": lambda request, context: ListCommandsResponse(
            commands=[command(command_pb2.COMMAND_STATE_RUNNING, workload_id="id-of-one")]
        ),
        "ListEvents": lambda request, context: ListEventsResponse(
            events=[Event(kind=event_pb2.EVENT_KIND_CORDON, message="cordoned", time=Timestamp(seconds=1))]
        ),
    }
    return scripted


def described(leasehold: CommandLine, *words: str) -> dict[str, str]:
    """The fields that are printed."""
    done = leasehold("describe", *words)
    assert (done.code, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    first = done.stdout.split("\n\n")[0]
    return {name: text.strip() for name, _, text in (line.partition(":") for line in first.splitlines())}


def test_a_workload(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    fields = described(leasehold, "workload", "one")
    assert fields["Worker"] == "alpha"
    assert fields["State"] == "RUNNING"
    assert fields["Created"].startswith("2023-11-14T22:13:20Z (")
    assert fields["Created"].endswith("d ago)")
    assert fields["Program"] == "python train\\x1b.py"
    assert fields["Variables"] == "KEY"
    assert fields["Labels"] == "team=vision"
    assert fields["Annotations"] == "note=a\\nb\\tc"
    assert fields["Process 7"] == "RUNNING, alpha/0 1.0 MiB"
    assert "Ended" not in fields
    printed = leasehold("describe", "wl", "one").stdout
    assert "\nCommands:\nID   OPERATION  ABOUT  STATE" in printed
    assert "\nEvents:\nAGE  " in printed


def test_a_workload_whose_exit_is_unknown(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    ended = workload("one")
    ended.status.state = workload_pb2.WORKLOAD_STATE_EXITED
    fleet.answers["GetWorkload"] = lambda request, context: GetWorkloadResponse(workload=ended)
    assert "Exit" not in described(leasehold, "workload", "one"), "others see no end at all"
    ended.status.end_time.FromSeconds(1)
    assert described(leasehold, "workload", "one")["Exit"].startswith("unknown: ")
    ended.status.exit.code = 0
    fields = described(leasehold, "workload", "one")
    assert fields["State"] == "EXITED(0)"
    assert "Exit" not in fields


def test_a_preemptible_workload(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    helper = workload("one")
    helper.spec.helper.grace.FromSeconds(2)
    fleet.answers["GetWorkload"] = lambda request, context: GetWorkloadResponse(workload=helper)
    told = described(leasehold, "workload", "one")["Preemptible"]
    assert told == "suspended 2 s after a yield request"
    helper.spec.helper.Clear()
    helper.spec.helper.process_strategy = PROCESS_STRATEGY_STOP
    told = described(leasehold, "workload", "one")["Preemptible"]
    assert told == "stopped 10 s after a yield request"


def test_hidden_fields_are_left_out(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    others = workload("one")
    fleet.answers["GetWorkload"] = lambda request, context: GetWorkloadResponse(workload=others)
    hidden = {"Origin", "Eviction policy", "Labels", "Generation"}
    assert hidden <= described(leasehold, "workload", "one").keys()
    others.ClearField("spec")
    assert not hidden & described(leasehold, "workload", "one").keys()
    assert "Timeout" not in described(leasehold, "command", "c-1")


def test_a_worker(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    fields = described(leasehold, "worker", "alpha")
    assert fields["GPUs"] == "?", "what is unknown is not 0"
    assert fields["Capability gpu_remap"] == "no: needs driver 580\\n\\x1b[31m"
    assert "\nGPUs:\nGPU " in leasehold("describe", "worker", "alpha").stdout


def test_a_gpu_a_command_and_a_checkpoint(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    assert described(leasehold, "gpu", "alpha/1")["Memory"] == "? of ? used"
    fields = described(leasehold, "command", "c-1")
    assert (fields["About"], fields["Actor"], fields["State"]) == ("one", "local/ann", "RUNNING")
    assert described(leasehold, "checkpoint", "k-2")["Size"] == "3.0 GiB"


def test_a_gpu_has_the_time_of_its_report() -> None:
    fields = dict(describe_gpu(FleetGpu(report_time=Timestamp(seconds=1))).fields)
    assert fields["Seen"].startswith("1970-01-01T00:00:01Z (")
    assert fields["Seen"].endswith(" ago)")


def test_an_unknown_duration_of_a_command_is_left_out(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    ended = command(command_pb2.COMMAND_STATE_SUCCEEDED, workload_id="id-of-one")
    ended.result.warnings.append("the worker restarted during the command and found it complete")
    fleet.answers["GetCommand"] = lambda request, context: GetCommandResponse(command=ended)
    assert "Duration" not in described(leasehold, "command", "c-1")
    ended.result.duration.FromSeconds(2)
    assert described(leasehold, "command", "c-1")["Duration"] == "2.00 s"


def test_a_command_whose_cancellation_is_requested(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    asked = command(command_pb2.COMMAND_STATE_RUNNING, workload_id="id-of-one", cancel_requested=True)
    fleet.answers |= {
        "GetCommand": lambda request, context: GetCommandResponse(command=asked),
        "ListCommands": lambda request, context: ListCommandsResponse(commands=[asked]),
    }
    assert described(leasehold, "command", "c-1")["Cancellation"] == "requested"
    assert "RUNNING,cancelling" in leasehold("get", "commands").stdout
    asked.end_time.FromSeconds(1)
    assert "cancelling" not in leasehold("get", "commands").stdout
    asked.state = command_pb2.COMMAND_STATE_SUCCEEDED
    assert described(leasehold, "command", "c-1")["Cancellation"] == "requested too late"
    asked.state = command_pb2.COMMAND_STATE_CANCELLED
    assert "Cancellation" not in described(leasehold, "command", "c-1")


@pytest.mark.parametrize("kind", ["cordon", "uncordon", "reset_gpu_health"])
def test_a_command_about_gpus_names_them(
    leasehold: CommandLine, fleet: ScriptedCoordinator, kind: str
) -> None:
    asked = Command(command_id="c-1", worker_id="w-1", state=command_pb2.COMMAND_STATE_SUCCEEDED)
    getattr(asked.operation, kind).gpu_uuids.extend([A, f"GPU-{'9' * 8}-0000"])
    fleet.answers |= {
        "GetCommand": lambda request, context: GetCommandResponse(command=asked),
        "ListCommands": lambda request, context: ListCommandsResponse(commands=[asked]),
    }
    assert described(leasehold, "command", "c-1")["About"] == "alpha/0, GPU-99999999"
    assert "  alpha/0, GPU-99999999  " in leasehold("get", "commands").stdout
    asked.operation.cordon.CopyFrom(CordonOperation(reason="a\nfan"))
    assert described(leasehold, "command", "c-1")["About"] == "alpha"
    assert described(leasehold, "command", "c-1")["Reason"] == "a\\nfan"


def test_a_remap_of_several_workloads_names_all_of_them(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    asked = command(command_pb2.COMMAND_STATE_SUCCEEDED, workload_id="id-of-one")
    for one in ("id-of-one", "id-of-two"):
        asked.operation.remap.moves.add(workload_id=one)
    fleet.answers |= {
        "GetCommand": lambda request, context: GetCommandResponse(command=asked),
        "ListCommands": lambda request, context: ListCommandsResponse(commands=[asked]),
    }
    assert described(leasehold, "command", "c-1")["About"] == "one, id-of-two"
    assert "  one, id-of-two  " in leasehold("get", "commands").stdout


def test_a_command_names_the_workloads_that_it_suspended_first(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    ended = command(command_pb2.COMMAND_STATE_SUCCEEDED, workload_id="id-of-two")
    fleet.answers["GetCommand"] = lambda request, context: GetCommandResponse(command=ended)
    assert "Preempted" not in described(leasehold, "command", "c-1")
    ended.result.preempted_workload_ids.append("id-of-one")
    assert described(leasehold, "command", "c-1")["Preempted"] == "one"


def test_what_is_refused(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    for words, code, match in (
        (["events", "e-1"], 2, "events have no description"),
        (["foo", "e-1"], 2, "choose workers, gpus, workloads, checkpoints, commands: see"),
        (["gpu", "alpha/9"], 2, "no GPU is at 'alpha/9'"),
        (["checkpoint", "k-99"], 1, "UNKNOWN_CHECKPOINT"),
        (["workload"], 2, "Missing argument 'NAME...'"),
        (["wrkload", "x"], 2, "did you mean 'workload'?"),
    ):
        done = leasehold("describe", *words)
        assert (done.code, done.stdout) == (code, "")
        assert match in done.stderr
    several = leasehold("describe", "gpu", "alpha/9", "alpha/0")
    assert (several.code, "no GPU is at 'alpha/9'" in several.stderr) == (2, True)
    assert "alpha/0" in several.stdout
