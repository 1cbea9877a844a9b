"""--dry-run: the plan as people and as programs read it, and how it ends."""

import json

import grpc
import pytest
from google.protobuf import duration_pb2
from leasehold.v1 import errors_pb2, plan_pb2, workload_pb2, workload_service_pb2
from leasehold.v1.errors_pb2 import Error
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold.v1.plan_pb2 import Check, DestinationPlan, Estimate, HostMemoryPlan, MemberPlan, Plan, TierPlan
from leasehold.v1.workload_pb2 import Member

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import A, B, C, ScriptedCoordinator, refuse, workload

GIB = 2**30

PLAN = Plan(
    members=[
        MemberPlan(
            workload_id="id-of-one",
            member=Member(
                pid=42, state=workload_pb2.MEMBER_STATE_RUNNING, device_memory_bytes={B: GIB, A: 3 * GIB}
            ),
        ),
        MemberPlan(workload_id="id-of-one", member=Member(pid=43000, state=workload_pb2.MEMBER_STATE_LOCKED)),
    ],
    pairs=[GpuPair(old_uuid=A, new_uuid=B), GpuPair(old_uuid=C, new_uuid=C)],
    released_gpu_uuids=[A],
    destinations=[
        DestinationPlan(gpu_uuid=B, gpu_name="H100", free_bytes=79 * GIB, needed_bytes=4 * GIB),
        DestinationPlan(gpu_uuid=C, gpu_name="H100"),
    ],
    host_memory=HostMemoryPlan(
        needed_bytes=4 * GIB, available_bytes=60 * GIB, cgroup_available_bytes=8 * GIB
    ),
    tiers=[
        TierPlan(tier=plan_pb2.TIER_HOST, needed_bytes=4 * GIB, available_bytes=60 * GIB),
        TierPlan(tier=plan_pb2.TIER_DISK, needed_bytes=GIB, available_bytes=2 * GIB),
    ],
    checks=[
        Check(name="driver", result=plan_pb2.CHECK_RESULT_PASSED, detail="580.95.05"),
        Check(name="host_memory", result=plan_pb2.CHECK_RESULT_WARNING, detail="little\nis left"),
        Check(name="mig", result=plan_pb2.CHECK_RESULT_NOT_CHECKED),
    ],
    estimate=Estimate(duration=duration_pb2.Duration(seconds=3, nanos=210_000_000), basis="at 2.5 GB/s"),
    warnings=["it holds pinned memory"],
)


def plays(scripted: ScriptedCoordinator, plan: Plan) -> None:
    scripted.answers["Plan"] = lambda request, context: workload_service_pb2.PlanResponse(plan=plan)


def test_a_plan_is_shown_and_nothing_is_begun(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    plays(scripted, PLAN)
    options = ["--to", "alpha/1", "--dry-run", "--lock-timeout", "2.5", "--no-wait", "--timeout", "9"]
    done = leasehold("remap", "one", *options)
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "one: remap would move 4.0 GiB; it releases alpha/0 and takes alpha/1, beta/0",
        "  pid 42     RUNNING  alpha/0 3.0 GiB, alpha/1 1.0 GiB",
        "  pid 43000  LOCKED   no device memory known",
        "  on disk  1.0 GiB needed  2.0 GiB available",
        "  host memory: 4.0 GiB needed, 60.0 GiB available, 8.0 GiB available in its cgroup",
        "  on alpha/1  4.0 GiB needed  79.0 GiB free  H100",
        "  on beta/0   ? needed        ? free         H100",
        "  pair alpha/0 -> alpha/1",
        "  driver       ok           580.95.05",
        "  host_memory  warning      little is left",
        "  mig          not checked",
        "  takes about 3.2 s (at 2.5 GB/s)",
        "  warning: it holds pinned memory",
    ]
    [request] = scripted.asked(workload_service_pb2.PlanRequest)
    assert request.remap.lock_timeout.ToMilliseconds() == 2500
    assert not [asked for asked in scripted.requests if hasattr(asked, "request_id")]


@pytest.mark.parametrize("output", ["table", "json"])
def test_every_refusal_is_a_line_on_standard_error(
    leasehold: CommandLine, scripted: ScriptedCoordinator, output: str
) -> None:
    plan = Plan(
        checks=[Check(name="host_memory", result=plan_pb2.CHECK_RESULT_REFUSED, detail="2 GiB are missing")],
        refusals=[
            Error(reason=errors_pb2.ERROR_REASON_WORKLOAD_BUSY, message="c-1 has\nnot ended"),
            Error(reason=errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY, message="2 GiB are missing"),
        ],
    )
    plays(scripted, plan)
    done = leasehold("suspend", "one", "--dry-run", "-o", output)
    assert done.code == 1
    assert done.stderr.splitlines() == [
        "leasehold: c-1 has not ended (WORKLOAD_BUSY)",
        "leasehold: 2 GiB are missing (INSUFFICIENT_HOST_MEMORY)",
    ]
    if output == "json":
        refusals = json.loads(done.stdout)["refusals"]
        assert [refusal["reason"] for refusal in refusals] == [
            "ERROR_REASON_WORKLOAD_BUSY",
            "ERROR_REASON_INSUFFICIENT_HOST_MEMORY",
        ]
    else:
        assert done.stdout.splitlines() == [
            "one: suspend would be REFUSED",
            "  host_memory  REFUSED  2 GiB are missing",
        ]


@pytest.mark.parametrize(
    ("plan", "line"),
    [
        (Plan(already_there=True), "would have nothing to do"),
        (Plan(), "would start"),
        (Plan(host_memory=HostMemoryPlan(needed_bytes=512)), "would move 512 B"),
        (Plan(released_gpu_uuids=[B, A]), "would start; it releases alpha/1, alpha/0"),
        (
            Plan(destinations=[DestinationPlan(gpu_uuid="GPU-x", needed_bytes=2048)]),
            "would move 2.0 KiB; it takes GPU-x",
        ),
        (Plan(destinations=[DestinationPlan(gpu_uuid=C)]), "would start; it takes beta/0"),
    ],
)
def test_the_first_line_says_what_would_happen(
    leasehold: CommandLine, scripted: ScriptedCoordinator, plan: Plan, line: str
) -> None:
    plays(scripted, plan)
    done = leasehold("restore", "one", "--dry-run")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == f"one: restore {line}"


@pytest.mark.parametrize("verb", ["restore", "wake"])
def test_a_restore_holds_its_bytes_already(
    leasehold: CommandLine, scripted: ScriptedCoordinator, verb: str
) -> None:
    host = TierPlan(tier=plan_pb2.TIER_HOST, needed_bytes=GIB)
    plays(scripted, Plan(tiers=[host]))
    assert leasehold(verb, "one", "--dry-run").stdout.splitlines() == [
        f"one: {verb} would move 1.0 GiB",
        "  in host memory  1.0 GiB held",
    ]
    image = TierPlan(tier=plan_pb2.TIER_DISK, needed_bytes=2 * GIB)
    plays(scripted, Plan(tiers=[image], host_memory=HostMemoryPlan(needed_bytes=GIB)))
    assert leasehold(verb, "one", "--dry-run").stdout.splitlines()[1:] == [
        "  on disk  2.0 GiB held",
        "  host memory: 1.0 GiB needed",
    ]


def test_a_plan_for_programs_has_the_fields_of_the_proto(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    plays(scripted, PLAN)
    done = leasehold("restore", "one", "--to", "alpha/1", "--dry-run", "-o", "json")
    assert (done.code, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["host_memory"]["needed_bytes"] == str(4 * GIB)
    assert document["destinations"][1] == {"gpu_uuid": C, "gpu_name": "H100"}
    [request] = scripted.asked(workload_service_pb2.PlanRequest)
    assert list(request.restore.gpu_uuids) == [B]


def test_members_of_several_workloads_are_told_apart(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    plan = Plan(
        members=[
            MemberPlan(workload_id=f"id-of-{name}", member=Member(pid=pid))
            for pid, name in enumerate(("one", "second"), 7)
        ]
    )
    plays(scripted, plan)
    scripted.answers["ListWorkloads"] = lambda request, context: workload_service_pb2.ListWorkloadsResponse(
        workloads=[workload("one")]
    )
    done = leasehold("remap", "one", "--to", "alpha/1", "--dry-run")
    assert done.stdout.splitlines()[1:] == [
        "  one           pid 7  UNSPECIFIED  no device memory known",
        "  id-of-second  pid 8  UNSPECIFIED  no device memory known",
    ]
    del scripted.answers["ListWorkloads"]
    done = leasehold("remap", "one", "--to", "alpha/1", "--dry-run")
    assert (done.code, len(done.stdout.splitlines())) == (0, 3)


def test_a_plan_that_can_not_be_made(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["Plan"] = lambda request, context: refuse(
        context, grpc.StatusCode.FAILED_PRECONDITION, "WORKER_UNAVAILABLE", "worker alpha is LOST"
    )
    done = leasehold("suspend", "one", "--dry-run")
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr == "leasehold: worker alpha is LOST (WORKER_UNAVAILABLE)\n"


def test_a_plan_names_gpus_one_way_and_tells_each_thing_once(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    refused = Check(name="memory", result=plan_pb2.CHECK_RESULT_REFUSED, detail=f"{B} has no room")
    passed = Check(name="mps", result=plan_pb2.CHECK_RESULT_PASSED, detail="not used")
    plan = Plan(
        checks=[passed, passed, refused],
        destinations=[DestinationPlan(gpu_uuid=B, gpu_name="H100")],
        pairs=[GpuPair(old_uuid=A, new_uuid=B), GpuPair(old_uuid=B, new_uuid=A)],
        refusals=[Error(reason=errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY, message=f"{B} has no room")],
        warnings=[f"{A} is warm"],
    )
    plays(scripted, plan)
    done = leasehold("remap", "one", "--to", "alpha/1", "--dry-run")
    assert done.stderr == "leasehold: alpha/1 has no room (INSUFFICIENT_HOST_MEMORY)\n"
    assert done.stdout.splitlines() == [
        "one: remap would be REFUSED",
        "  on alpha/1  ? needed  ? free  H100",
        "  pair alpha/0 -> alpha/1",
        "  mps     ok       not used",
        "  memory  REFUSED  alpha/1 has no room",
        "  warning: alpha/0 is warm",
    ]


def test_the_checks_of_several_workloads_say_whose_they_are(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    passed = plan_pb2.CHECK_RESULT_PASSED
    plan = Plan(
        checks=[
            Check(name="runnable", result=passed, detail="looked at 1", workload_id="id-of-one"),
            Check(name="runnable", result=passed, detail="looked at 1", workload_id="id-of-two"),
            Check(name="mig", result=passed, detail="off"),
        ],
    )
    plays(scripted, plan)
    scripted.answers["GetWorkload"] = lambda request, _: workload_service_pb2.GetWorkloadResponse(
        workload=workload(request.workload, A if request.workload == "one" else B)
    )
    scripted.answers["ListWorkloads"] = lambda request, _: workload_service_pb2.ListWorkloadsResponse(
        workloads=[workload("one"), workload("two")]
    )
    done = leasehold("remap", "one", "two", "--swap", "--dry-run")
    assert done.stdout.splitlines()[1:] == [
        "  one  runnable  ok  looked at 1",
        "  two  runnable  ok  looked at 1",
        "  -    mig       ok  off",
    ]
