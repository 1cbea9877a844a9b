"""Streams end as soon as their caller's role permits or shows something else."""

import asyncio

import pytest
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import parse_identity
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.api.live_streams import LiveStreams
from leasehold_coordinator.errors import FleetError, reason_name

FLEET = "/leasehold.v1.FleetService/WatchFleet"
COMMAND = "/leasehold.v1.CommandService/WatchCommand"
OUTPUT = "/leasehold.v1.WorkloadService/ReadWorkloadOutput"


@pytest.mark.parametrize(
    ("method", "before", "after", "reason"),
    [
        (FLEET, Role.VIEWER, Role.NONE, "NOT_PERMITTED"),
        (FLEET, Role.OPERATOR, Role.NONE, "NOT_PERMITTED"),
        (OUTPUT, Role.USER, Role.VIEWER, "NOT_PERMITTED"),
        (FLEET, Role.USER, Role.OPERATOR, "INVALID_TOKEN"),
        (FLEET, Role.ADMIN, Role.USER, "INVALID_TOKEN"),
        (COMMAND, Role.OPERATOR, Role.USER, "INVALID_TOKEN"),
        (OUTPUT, Role.OPERATOR, Role.USER, "INVALID_TOKEN"),
        (COMMAND, Role.USER, Role.OPERATOR, ""),
        (FLEET, Role.VIEWER, Role.USER, ""),
        (FLEET, Role.OPERATOR, Role.ADMIN, ""),
    ],
)
@pytest.mark.parametrize("is_early", [False, True])
def test_a_change_of_a_role_ends_a_stream(
    method: str, before: Role, after: Role, reason: str, is_early: bool
) -> None:
    async def scenario() -> None:
        present = after if is_early else before  # early: between the permission and the begin
        live = LiveStreams(lambda caller: present)
        caller = Caller(parse_identity("user/ann"), "ipv4:10.0.0.1", role=before)
        async with live.entered(caller, method):
            present = after
            live.authorize_again()
            live.authorize_again()
            async with asyncio.timeout(0.01 if not reason else 20):
                await asyncio.Event().wait()

    with pytest.raises((FleetError, TimeoutError)) as error:
        asyncio.run(scenario())
    found = error.value
    assert (reason_name(found.reason) if isinstance(found, FleetError) else "") == reason
