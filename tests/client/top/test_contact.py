"""The connection's state."""

import grpc
from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import WhoAmIResponse
from leasehold_client.errors import LeaseholdError, NoCoordinatorError
from leasehold_client.top.contact import Contact

VIEWER, USER = access_service_pb2.ROLE_VIEWER, access_service_pb2.ROLE_USER


def test_only_an_outage_means_away_and_the_first_failure_counts() -> None:
    times = iter((5.0, 9.0))
    contact = Contact(lambda: next(times))
    contact.failed(LeaseholdError("busy", "TOO_MANY_CALLS", code=grpc.StatusCode.RESOURCE_EXHAUSTED))
    assert not contact.answered(WhoAmIResponse())
    contact.failed(NoCoordinatorError("nobody"))
    contact.failed(NoCoordinatorError("nobody"))
    assert (contact.lost_since, contact.problem) == (5.0, "nobody")
    assert contact.answered(WhoAmIResponse())
    assert not contact.answered(WhoAmIResponse())
    assert contact.problem == ""


def test_what_a_role_does_not_permit() -> None:
    contact = Contact(lambda: 0.0)
    contact.answered(WhoAmIResponse(identity="user/eve", role=VIEWER))
    assert contact.not_permitted("look", VIEWER) == ""
    assert contact.not_permitted("suspend", USER) == (
        "suspend needs the role user, and user/eve has the role viewer: ask an admin for "
        "`leasehold access grant user user/eve`"
    )
    contact.answered(WhoAmIResponse(identity="service/x", on_behalf_of="user/bob"))
    assert "user/bob has no role" in contact.not_permitted("suspend", USER)
