"""Role bindings by the command line."""

import json

import grpc
import pytest
from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import GrantRequest, RevokeRequest, RoleBinding
from leasehold_client.cli.access import ROLES
from leasehold_client.coordinator import access_changes

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, refuse

BATCH = RoleBinding(
    identity="service/batch",
    role=access_service_pb2.ROLE_ON_BEHALF_OF,
    users="user/*",
    granted_by="local/root",
)


def test_the_command_line_has_the_roles_of_the_api() -> None:
    assert set(ROLES) == set(access_changes.ROLES)


def test_a_role_is_granted_and_revoked(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["Grant"] = lambda request, context: access_service_pb2.GrantResponse(binding=BATCH)
    done = leasehold("access", "grant", "on_behalf_of", "service/batch", "--users", "user/*")
    assert (done.code, done.stdout) == (0, "service/batch on_behalf_of for user/*: granted by local/root\n")
    [asked] = scripted.asked(GrantRequest)
    assert asked.binding.role == BATCH.role
    scripted.answers["Revoke"] = lambda request, context: access_service_pb2.RevokeResponse()
    done = leasehold("access", "revoke", "operator", "user/ann")
    assert (done.code, done.stdout) == (0, "user/ann operator: revoked\n")
    [revoked] = scripted.asked(RevokeRequest)
    assert revoked.binding == RoleBinding(identity="user/ann", role=access_service_pb2.ROLE_OPERATOR)


@pytest.mark.usefixtures("short_outages")
def test_a_revocation_that_may_be_made_is_not_repeated(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.answers["Revoke"] = lambda request, context: context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
    assert leasehold("access", "revoke", "operator", "user/ann").code == 3
    assert len(scripted.asked(RevokeRequest)) == 1


@pytest.mark.parametrize("verb", ["grant", "revoke"])
def test_users_are_for_on_behalf_of_only(
    leasehold: CommandLine, scripted: ScriptedCoordinator, verb: str
) -> None:
    done = leasehold("access", verb, "on_behalf_of", "service/batch")
    assert done.code == 2
    assert "on_behalf_of needs the users for whom the service acts: add --users PATTERN" in done.stderr
    done = leasehold("access", verb, "user", "user/ann", "--users", "user/*")
    assert done.code == 2
    assert "--users is only for the role on_behalf_of, and not for user: leave it out" in done.stderr
    assert not scripted.requests


def test_bindings_are_listed(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["ListBindings"] = lambda request, context: access_service_pb2.ListBindingsResponse(
        bindings=[BATCH]
    )
    done = leasehold("access", "list")
    assert done.stdout.splitlines()[1].split()[:3] == ["service/batch", "on_behalf_of", "for"]
    assert json.loads(leasehold("access", "list", "-o", "json").stdout)["bindings"][0]["users"] == "user/*"


def test_whoami(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    answer = access_service_pb2.WhoAmIResponse(identity="local/ann", role=access_service_pb2.ROLE_USER)
    scripted.answers["WhoAmI"] = lambda request, context: answer
    assert leasehold("whoami").stdout == "local/ann: user\n"
    answer.role = access_service_pb2.ROLE_UNSPECIFIED
    assert leasehold("whoami").stdout == "local/ann: no role\n"


def test_a_service_acts_for_a_user(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    answer = access_service_pb2.WhoAmIResponse(
        identity="service/batch", role=access_service_pb2.ROLE_USER, on_behalf_of="user/ann"
    )
    sent: list[dict[str, str | bytes]] = []

    def who_am_i(
        request: access_service_pb2.WhoAmIRequest, context: grpc.ServicerContext
    ) -> access_service_pb2.WhoAmIResponse:
        sent.append(dict(context.invocation_metadata()))
        return answer

    scripted.answers["WhoAmI"] = who_am_i
    assert leasehold("whoami", "--as", "user/ann").stdout == "service/batch on behalf of user/ann: user\n"
    leasehold("whoami")
    assert [one.get("leasehold-on-behalf-of") for one in sent] == ["user/ann", None]


def test_a_refusal_names_the_remedy(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["ListBindings"] = lambda request, context: refuse(
        context, grpc.StatusCode.PERMISSION_DENIED, "NOT_PERMITTED", "local/ann has no role: ask an admin"
    )
    done = leasehold("access", "list")
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr == "leasehold: local/ann has no role: ask an admin (NOT_PERMITTED)\n"
