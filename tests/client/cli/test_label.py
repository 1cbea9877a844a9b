"""Labels and annotations of workloads by the command line."""

import json

import grpc
import pytest
from leasehold.v1 import workload_service_pb2
from leasehold.v1.workload_pb2 import Workload
from leasehold.v1.workload_service_pb2 import UpdateWorkloadRequest
from leasehold_client.cli.label import changed
from leasehold_client.errors import UsageError

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, refuse


def serve(scripted: ScriptedCoordinator, known: Workload, refusals: int = 0) -> None:
    """Has a workload read, and changed after some refusals."""
    left = [refusals]

    def update(
        request: UpdateWorkloadRequest, context: grpc.ServicerContext
    ) -> workload_service_pb2.UpdateWorkloadResponse:
        if left[0]:
            left[0] -= 1
            refuse(context, grpc.StatusCode.ABORTED, "ETAG_MISMATCH", "the labels have changed")
        return workload_service_pb2.UpdateWorkloadResponse(workload=request.workload)

    scripted.answers["GetWorkload"] = lambda request, context: workload_service_pb2.GetWorkloadResponse(
        workload=known
    )
    scripted.answers["UpdateWorkload"] = update


KNOWN = Workload(workload_id="w-1", name="one", etag="e-1", labels={"team": "a", "old": "x"})


def test_labels_are_set_and_removed_and_others_stay(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve(scripted, KNOWN, refusals=1)
    done = leasehold("label", "workload", "one", "tier=gold=2", "old-", "never-", "empty=")
    assert (done.code, done.stderr) == (0, "leasehold: one had no label never to remove\n")
    first, second = scripted.asked(UpdateWorkloadRequest)
    assert first == second
    assert dict(second.workload.labels) == {"team": "a", "tier": "gold=2", "empty": ""}
    assert (second.workload.workload_id, second.workload.etag) == ("w-1", "e-1")
    assert list(second.update_mask.paths) == ["labels"]


def test_annotations_are_set_likewise(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    serve(scripted, KNOWN)
    done = leasehold("annotate", "workload", "one", "note=a b", "-o", "json")
    assert json.loads(done.stdout)["annotations"] == {"note": "a b"}
    [request] = scripted.asked(UpdateWorkloadRequest)
    assert list(request.update_mask.paths) == ["annotations"]


def test_a_line_break_in_a_value_forges_no_line(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve(scripted, Workload(workload_id="w-1", name="one", etag="e-1"))
    done = leasehold("label", "workload", "one", "note=a\nleasehold: all is well\tnow")
    assert done.stdout == ": note=a\\nleasehold: all is well\\tnow\n"


def test_a_workload_that_always_changes_is_left_alone(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    serve(scripted, KNOWN, refusals=99)
    done = leasehold("label", "workload", "one", "a=b")
    assert done.code == 1
    assert "(ETAG_MISMATCH)" in done.stderr


@pytest.mark.parametrize("change", ["", "a", "-", "=b"])
def test_a_change_is_key_value_or_key_and_a_dash(change: str) -> None:
    with pytest.raises(UsageError, match="write KEY=VALUE"):
        changed({}, [change])


@pytest.mark.parametrize("changes", [["a=1", "a=2"], ["a=1", "a-"]])
def test_two_changes_of_a_key_are_refused(changes: list[str]) -> None:
    with pytest.raises(UsageError, match="the key 'a' has two changes: give one"):
        changed({}, changes)
