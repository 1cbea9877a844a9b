"""A creating call whose answer is lost: it is asked for again by the same id, and never done twice."""

from typing import Any

import grpc
import pytest
from leasehold.v1 import command_pb2, fleet_pb2
from leasehold_client import Client, LeaseholdError, NoCoordinatorError, resuming

from .scripted_coordinator import A, B, ScriptedCoordinator, command, refuse

CALLS = {
    "CreateWorkload": lambda client: client.run(fleet_pb2.CreateWorkloadRequest().spec),
    "SuspendWorkload": lambda client: client.suspend("one"),
    "RestoreWorkload": lambda client: client.restore("one"),
    "RemapWorkloads": lambda client: client.remap({"one": [(A, B)]}),
    "StopWorkload": lambda client: client.stop("one"),
}


@pytest.mark.parametrize("method", CALLS)
def test_a_lost_answer_is_asked_for_again_by_the_same_id(scripted: ScriptedCoordinator, method: str) -> None:
    def lose_the_first(request: Any, context: grpc.ServicerContext) -> Any:
        if len(scripted.requests) == 1:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        kind = method.replace("CreateWorkload", "CreateWorkloadResponse")
        kind = kind if kind.endswith("Response") else f"{kind}Response"
        return getattr(fleet_pb2, kind)(command=command(command_pb2.COMMAND_STATE_PENDING))

    scripted.answers[method] = lose_the_first
    with Client(scripted.address) as client:
        CALLS[method](client)
    first, second = scripted.requests
    assert first == second
    assert first.request_id  # type: ignore[attr-defined]


def test_a_refusal_is_not_asked_for_again(scripted: ScriptedCoordinator) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.UNAVAILABLE, "WORKER_UNAVAILABLE", "worker alpha is LOST"
    )
    with Client(scripted.address) as client, pytest.raises(LeaseholdError, match="alpha is LOST"):
        client.suspend("one")
    assert len(scripted.requests) == 1


def test_a_coordinator_that_stays_away_may_have_stored_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "REPEAT_LIMIT_S", 0.0)
    with Client("127.0.0.1:1") as client, pytest.raises(NoCoordinatorError, match="what it stored before"):
        client.suspend("one")
