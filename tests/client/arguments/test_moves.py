"""Several workloads moved by one command, as the options of remap say."""

import pytest
from leasehold.v1 import command_pb2, fleet_service_pb2, workload_pb2, workload_service_pb2
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import A, B, C, ScriptedCoordinator, command, workload

PENDING, SUCCEEDED = command_pb2.COMMAND_STATE_PENDING, command_pb2.COMMAND_STATE_SUCCEEDED
PARKED = Workload(name="parked", status=WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_SUSPENDED))

D = A.replace("a", "d")

Sent = list[tuple[str, list[tuple[str, str]]]]


@pytest.fixture
def holders(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """Workload one holds A, two holds B, both holds C and A; nothing is held by parked."""
    scripted.plays(command(SUCCEEDED))
    host = [
        FleetGpu(worker_id="w-1", worker_name="alpha", gpu=Gpu(uuid=uuid, slot=n))
        for n, uuid in enumerate((A, B, C))
    ]
    scripted.answers["ListGpus"] = lambda request, context: fleet_service_pb2.ListGpusResponse(
        gpus=[*host, FleetGpu(worker_id="w-2", worker_name="beta", gpu=Gpu(uuid=D, slot=0))]
    )
    known = {
        "one": workload("one", A),
        "id-of-one": workload("one", A),
        "two": workload("two", B),
        "both": workload("both", C, A),
        "other": workload("other", B, C),
        "far": workload("far", D),
        "parked": PARKED,
    }
    scripted.answers["GetWorkload"] = lambda request, context: workload_service_pb2.GetWorkloadResponse(
        workload=known[request.workload]
    )
    scripted.answers["RemapWorkloads"] = lambda request, context: workload_service_pb2.RemapWorkloadsResponse(
        command=command(PENDING)
    )
    return scripted


def sent(scripted: ScriptedCoordinator) -> Sent:
    [request] = scripted.asked(workload_service_pb2.RemapWorkloadsRequest)
    return [
        (move.workload_id, [(pair.old_uuid, pair.new_uuid) for pair in move.pairs])
        for move in request.operation.moves
    ]


@pytest.mark.parametrize(
    ("arguments", "moves"),
    [
        ("one two --swap", [("id-of-one", [(A, B)]), ("id-of-two", [(B, A)])]),
        ("both other --swap", [("id-of-both", [(C, B), (A, C)]), ("id-of-other", [(B, C), (C, A)])]),
        (
            "two one --pair alpha/0=alpha/2 --pair alpha/1=alpha/0",
            [("id-of-two", [(B, A)]), ("id-of-one", [(A, C)])],
        ),
        ("one --pair alpha/1=alpha/2", [("one", [(B, C)])]),
        ("one --to alpha/2", [("id-of-one", [(A, C)])]),
    ],
)
def test_each_workload_gets_its_pairs(
    leasehold: CommandLine, holders: ScriptedCoordinator, arguments: str, moves: Sent
) -> None:
    done = leasehold("remap", *arguments.split(), "--lock-timeout", "0.5")
    assert (done.code, done.stderr) == (0, "")
    assert sent(holders) == moves
    names = ", ".join(name for name in arguments.split(" --")[0].split())
    assert done.stdout.startswith(f"{names}: ")
    [request] = holders.asked(workload_service_pb2.RemapWorkloadsRequest)
    assert request.operation.lock_timeout.ToMilliseconds() == 500


@pytest.mark.parametrize(
    ("arguments", "code", "match"),
    [
        (
            "one far --swap",
            2,
            "one can't move from alpha/0 to beta/0: a running workload can't leave its worker",
        ),
        ("one both --swap", 2, "one and both hold 1 and 2 GPUs: only equal counts can be swapped"),
        ("one id-of-one --swap", 2, "one and id-of-one are the same workload: name each workload once"),
        ("one one --pair alpha/0=alpha/1", 2, "one and one are the same workload"),
        (
            "one two --pair alpha/0=alpha/1 --pair alpha/2=alpha/0",
            2,
            "the pair 'alpha/2=alpha/0' moves alpha/2, which none of one, two holds",
        ),
        ("one two --pair alpha/0=alpha/1", 2, "no --pair moves a GPU of two: add a pair, or leave two out"),
        ("one parked --swap", 1, "parked is SUSPENDED and holds no GPU"),
        ("parked one --pair alpha/0=alpha/1", 1, "(WRONG_STATE)"),
    ],
)
def test_moves_that_make_no_sense(
    leasehold: CommandLine, holders: ScriptedCoordinator, arguments: str, code: int, match: str
) -> None:
    done = leasehold("remap", *arguments.split())
    assert (done.code, done.stdout) == (code, "")
    assert match in done.stderr
    assert done.stderr.count("\n") == 1
    assert not holders.asked(workload_service_pb2.RemapWorkloadsRequest)


def test_a_swap_can_be_planned(leasehold: CommandLine, holders: ScriptedCoordinator) -> None:
    holders.answers["Plan"] = lambda request, context: workload_service_pb2.PlanResponse()
    done = leasehold("remap", "one", "two", "--swap", "--dry-run")
    assert (done.code, done.stdout) == (0, "one, two: remap would start\n")
    [request] = holders.asked(workload_service_pb2.PlanRequest)
    moves = request.remap.moves
    assert [move.workload_id for move in moves] == ["id-of-one", "id-of-two"]


@pytest.mark.parametrize("option", [["--to", "beta/0"], ["--pair", "alpha/0=beta/0"]])
@pytest.mark.parametrize("planned", [[], ["--dry-run"]])
def test_a_workload_that_runs_cannot_leave_its_host(
    leasehold: CommandLine, holders: ScriptedCoordinator, option: list[str], planned: list[str]
) -> None:
    done = leasehold("remap", "one", *option, *planned)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == (
        "leasehold: one can't move from alpha/0 to beta/0: a running workload can't leave its worker; move "
        "and swap between GPUs of alpha\n"
    )
