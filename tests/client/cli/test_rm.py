"""Deletion of checkpoints, and of records of workloads and workers."""

import json

import grpc
import pytest
from leasehold.v1 import (
    fleet_service_pb2,
    operation_pb2,
    worker_pb2,
    workload_service_pb2,
)
from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.worker_pb2 import Worker

from tests.client.checkpoints import GIB, MADE, done_command, serve, watched
from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, refuse


def test_checkpoints_are_deleted_by_one_command_for_each_worker(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve(scripted, *MADE)
    watched(scripted, done_command(Operation(delete_checkpoints=operation_pb2.DeleteCheckpointsOperation())))
    done = leasehold("rm", "checkpoint", "k-2", "k-1", "k-0", "k-2", "--force")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "k-2, k-0: delete_checkpoints done",
        "k-1: delete_checkpoints done",
    ]
    requests = scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)
    assert [(one.worker, list(one.operation.checkpoint_ids)) for one in requests] == [
        ("w-1", ["k-2", "k-0"]),
        ("w-9", ["k-1"]),
    ]
    assert all(one.operation.force for one in requests)


def test_one_that_nobody_has_keeps_all(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    serve(scripted, *MADE, unreachable=("w-2",))
    done = leasehold("rm", "checkpoint", "k-2", "k-7")
    assert (done.code, done.stdout) == (1, "")
    told, refused = done.stderr.splitlines()
    assert "so their checkpoints are unknown: beta" in told
    assert refused == (
        "leasehold: no worker that answered has a checkpoint 'k-7', and nothing was deleted: "
        "`leasehold get checkpoints` lists checkpoints (UNKNOWN_CHECKPOINT)"
    )
    assert not scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)


def test_what_would_be_deleted_is_told_and_nothing_is(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve(scripted, *MADE)
    done = leasehold("rm", "checkpoint", "k-2", "k-0", "--dry-run", "--force")
    assert (done.code, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["ID", "k-2", "k-0", "would"]
    assert done.stdout.splitlines()[-1] == "would free 3.0 GiB on disk"
    refused = leasehold("rm", "checkpoint", "k-2", "--dry-run", "-o", "json")
    assert refused.code == 1
    assert json.loads(refused.stdout)["freed_bytes"] == str(3 * GIB)
    assert "(CHECKPOINT_IN_USE)" in refused.stderr
    assert not scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)


def test_one_that_is_needed_is_refused(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    serve(scripted, *MADE)
    done = leasehold("rm", "checkpoint", "k-0", "k-2")
    assert (done.code, done.stdout) == (1, "")
    assert "needs the checkpoint k-2, and nothing was deleted" in done.stderr
    assert not scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)
    scripted.answers["DeleteCheckpoints"] = lambda request, context: refuse(
        context, grpc.StatusCode.FAILED_PRECONDITION, "CHECKPOINT_IN_USE", "one needs k-0"
    )
    done = leasehold("rm", "checkpoint", "k-0")
    assert (done.code, done.stderr) == (1, "leasehold: one needs k-0 (CHECKPOINT_IN_USE)\n")


def shared(worker_id: str, *, in_use: bool = False, in_use_unknown: bool = False) -> Checkpoint:
    """What w-2 made, as a worker with the same directory lists it."""
    return Checkpoint(
        checkpoint_id="k-5",
        worker_id=worker_id,
        owner_worker_id="w-2",
        size_bytes=GIB,
        in_use=in_use,
        in_use_unknown=in_use_unknown,
    )


def test_nobody_waits_for_a_worker_that_was_deleted(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    foreign = shared("w-1", in_use=True, in_use_unknown=True)
    foreign.owner_worker_id = "w-9"
    serve(scripted, foreign)
    assert leasehold("rm", "checkpoint", "k-5").stderr == (
        "leasehold: the checkpoint k-5 belongs to worker w-9, which did not list it and whose workloads may "
        "need it, and nothing was deleted: delete it with --force (CHECKPOINT_IN_USE)\n"
    )


def test_what_several_workers_list_is_deleted_once_by_the_one_that_made_it(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve(scripted, shared("w-1"), shared("w-2"))
    watched(scripted, done_command(Operation(delete_checkpoints=operation_pb2.DeleteCheckpointsOperation())))
    dry = leasehold("rm", "checkpoint", "k-5", "--dry-run")
    assert dry.stdout.splitlines()[1:] == [
        "k-5  unspecified            beta    1.0 GiB  -    -",
        "would free 1.0 GiB on disk",
    ]
    assert leasehold("rm", "checkpoint", "k-5").code == 0
    [request] = scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)
    assert (request.worker, list(request.operation.checkpoint_ids)) == ("w-2", ["k-5"])


def test_all_checkpoints_that_nobody_needs_are_deleted(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve(scripted, *MADE)
    watched(scripted, done_command(Operation(delete_checkpoints=operation_pb2.DeleteCheckpointsOperation())))
    dry = leasehold("rm", "checkpoint", "--all", "--dry-run")
    assert [line.split()[0] for line in dry.stdout.splitlines()] == ["ID", "k-1", "k-0", "would"]
    assert "delete k-1, k-0: without a terminal" in leasehold("rm", "checkpoint", "--all").stderr
    assert not scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)
    assert leasehold("rm", "checkpoint", "--all", "--yes").code == 0
    requests = scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)
    assert sorted(list(request.operation.checkpoint_ids) for request in requests) == [["k-0"], ["k-1"]]
    assert leasehold("rm", "checkpoint", "k-0", "--all").code == 2
    serve(scripted, MADE[0])
    assert leasehold("rm", "checkpoint", "--all").stderr.splitlines() == [
        "leasehold: kept, since suspended workloads need them: k-2",
        "leasehold: no checkpoint matches, so nothing was done",
    ]


def test_what_a_silent_worker_may_need_is_deleted_only_by_name_and_force(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve(scripted, shared("w-1", in_use=True, in_use_unknown=True), *MADE, unreachable=("w-2",))
    watched(scripted, done_command(Operation(delete_checkpoints=operation_pb2.DeleteCheckpointsOperation())))
    listed = leasehold("get", "checkpoints").stdout.splitlines()
    assert [line.split()[-1] for line in listed[1:]] == ["?", "yes", "-", "-"]
    described = leasehold("describe", "checkpoint", "k-5").stdout.splitlines()
    assert [line.split()[-1] for line in described if line.startswith("In use")] == ["unknown"]
    for dry_run in ([], ["--dry-run"]):
        refused = leasehold("rm", "checkpoint", "k-5", "k-0", *dry_run)
        assert refused.code == 1
        assert refused.stderr.splitlines()[1] == (
            "leasehold: the checkpoint k-5 belongs to worker beta, which did not list it and whose workloads "
            "may need it, and nothing was deleted: ask again when the worker lists it, or delete it with "
            "--force (CHECKPOINT_IN_USE)"
        )
    assert not scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)
    unknown = (
        "leasehold: kept, since the workers that made them did not list them, and may need them: k-5 (beta); "
        "name a checkpoint with --force to delete it"
    )
    kept = ["leasehold: kept, since suspended workloads need them: k-2", unknown]
    dry = leasehold("rm", "checkpoint", "--all", "--force", "--dry-run")
    assert (dry.code, dry.stderr.splitlines()[1:]) == (0, kept)
    assert [line.split()[0] for line in dry.stdout.splitlines()] == ["ID", "k-1", "k-0", "would"]
    for force in ([], ["--force"]):
        scripted.requests.clear()
        done = leasehold("rm", "checkpoint", "--all", "--yes", *force)
        assert (done.code, done.stderr.splitlines()[1:]) == (0, kept)
        requests = scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)
        assert sorted(list(request.operation.checkpoint_ids) for request in requests) == [["k-0"], ["k-1"]]
        assert not any(request.operation.force for request in requests)
    scripted.requests.clear()
    assert leasehold("rm", "checkpoint", "k-5", "--force").code == 0
    (request,) = scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)
    assert (request.worker, request.operation.force) == ("w-1", True)


@pytest.mark.parametrize("needing", ["w-1", "w-2"])
def test_what_one_of_several_workers_needs_is_not_deleted(
    leasehold: CommandLine, scripted: ScriptedCoordinator, needing: str
) -> None:
    serve(scripted, *(shared(one, in_use=one == needing) for one in ("w-1", "w-2")))
    watched(scripted, done_command(Operation(delete_checkpoints=operation_pb2.DeleteCheckpointsOperation())))
    assert "(CHECKPOINT_IN_USE)" in leasehold("rm", "checkpoint", "k-5").stderr
    assert not scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)
    assert leasehold("rm", "checkpoint", "k-5", "--force").code == 0
    assert len(scripted.asked(workload_service_pb2.DeleteCheckpointsRequest)) == 1


def test_ended_workloads_are_deleted_and_each_refusal_is_printed(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    def delete(
        request: workload_service_pb2.DeleteWorkloadRequest, context: grpc.ServicerContext
    ) -> workload_service_pb2.DeleteWorkloadResponse:
        if request.workload != "one":
            refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE", f"{request.workload} lives")
        return workload_service_pb2.DeleteWorkloadResponse(deleted_command_count=3)

    scripted.answers["DeleteWorkload"] = delete
    done = leasehold("rm", "workload", "two", "one", "three")
    assert (done.code, done.stdout) == (1, "one: deleted, with 3 commands\n")
    assert done.stderr.splitlines() == [
        "leasehold: two lives (WRONG_STATE)",
        "leasehold: three lives (WRONG_STATE)",
    ]
    assert len(scripted.asked(workload_service_pb2.DeleteWorkloadRequest)) == 3
    documents = {
        ("two", "one"): (1, {"deleted": [{"deleted_command_count": 3}]}),
        ("one",): (0, {"deleted_command_count": 3}),
        ("--all", "--yes"): (0, {"deleted": []}),
    }
    scripted.answers["ListWorkloads"] = lambda request, context: workload_service_pb2.ListWorkloadsResponse()
    for arguments, (code, document) in documents.items():
        done = leasehold("rm", "workload", *arguments, "-o", "json")
        assert (done.code, json.loads(done.stdout)) == (code, document)


@pytest.mark.usefixtures("short_outages")
def test_the_document_of_several_tells_what_was_deleted_before_an_outage(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    def delete(
        request: fleet_service_pb2.DeleteWorkerRequest, context: grpc.ServicerContext
    ) -> fleet_service_pb2.DeleteWorkerResponse:
        if request.worker != "alpha":
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return fleet_service_pb2.DeleteWorkerResponse(worker=Worker(name="alpha"))

    scripted.answers["DeleteWorker"] = delete
    done = leasehold("rm", "worker", "alpha", "beta", "gamma", "-o", "json")
    assert done.code == 3
    assert [one["worker"]["name"] for one in json.loads(done.stdout)["deleted"]] == ["alpha"]


def serve_workers(scripted: ScriptedCoordinator, *states: str) -> None:
    """Serves workers in these states, with the names w-CONNECTED and so on."""
    scripted.answers |= {
        "ListWorkers": lambda request, context: fleet_service_pb2.ListWorkersResponse(
            workers=[
                Worker(
                    worker_id=f"id-{one}",
                    name=f"w-{one}",
                    state=worker_pb2.WorkerState.Value(f"WORKER_STATE_{one}"),
                )
                for one in states
            ]
        ),
        "DeleteWorker": lambda request, context: fleet_service_pb2.DeleteWorkerResponse(
            worker=Worker(worker_id=request.worker, name=request.worker.replace("id-", "w-"))
        ),
    }


def test_all_workers_that_are_gone_are_deleted_and_the_others_are_named(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve_workers(scripted, "CONNECTED", "STALE", "UNCONFIRMED", "LOST", "DISCONNECTED")
    kept = (
        "leasehold: kept, since neither LOST nor DISCONNECTED: w-CONNECTED (CONNECTED), w-STALE (STALE), "
        "w-UNCONFIRMED (UNCONFIRMED)"
    )
    unanswered = leasehold("rm", "worker", "--all")
    assert unanswered.code == 2
    assert unanswered.stderr.splitlines()[0] == kept
    assert "delete the records of w-LOST, w-DISCONNECTED: without a terminal" in unanswered.stderr
    assert not scripted.asked(fleet_service_pb2.DeleteWorkerRequest)
    done = leasehold("rm", "worker", "--all", "--yes")
    assert (done.code, done.stderr.splitlines()) == (0, [kept])
    assert done.stdout.splitlines() == [
        "w-LOST (id-LOST): deleted",
        "w-DISCONNECTED (id-DISCONNECTED): deleted",
    ]
    asked = scripted.asked(fleet_service_pb2.DeleteWorkerRequest)
    assert [request.worker for request in asked] == ["id-LOST", "id-DISCONNECTED"]


def test_a_search_that_finds_no_worker_deletes_none(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve_workers(scripted, "CONNECTED")
    done = leasehold("rm", "worker", "--all", "--yes")
    assert (done.code, done.stdout) == (0, "")
    assert done.stderr.splitlines()[1:] == ["leasehold: no worker matches, so nothing was done"]
    assert not scripted.asked(fleet_service_pb2.DeleteWorkerRequest)
    assert leasehold("rm", "worker").code == 2
    assert leasehold("rm", "worker", "w-CONNECTED", "--all").code == 2


def test_a_worker_that_is_refused_after_the_search_fails_the_verb(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve_workers(scripted, "LOST", "DISCONNECTED")
    deleted = scripted.answers["DeleteWorker"]

    def delete(request: fleet_service_pb2.DeleteWorkerRequest, context: grpc.ServicerContext) -> object:
        if request.worker == "id-LOST":
            refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "WORKER_CONNECTED", "w-LOST is connected")
        return deleted(request, context)

    scripted.answers["DeleteWorker"] = delete
    done = leasehold("rm", "worker", "--all", "--yes")
    assert (done.code, done.stdout) == (1, "w-DISCONNECTED (id-DISCONNECTED): deleted\n")
    assert done.stderr == "leasehold: w-LOST is connected (WORKER_CONNECTED)\n"
