"""Roles of callers, and calls on behalf of users."""

from typing import cast

import grpc
import pytest
from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold_coordinator.access.bindings import Bindings
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import parse_identity
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.api.authorization import ON_BEHALF_OF_KEY, Authorization
from leasehold_coordinator.errors import FleetError, reason_name

LIST = "/leasehold.v1.FleetService/ListWorkers"
CREATE = "/leasehold.v1.WorkloadService/CreateWorkload"
WHO_AM_I = "/leasehold.v1.AccessService/WhoAmI"
CORDON = "/leasehold.v1.FleetService/Cordon"


def bound(*texts: str) -> Authorization:
    """An authorization with bindings, each ``IDENTITY ROLE [USERS]``."""
    bindings = Bindings()
    for text in texts:
        identity, role, *users = text.split()
        number = access_service_pb2.Role.Value(f"ROLE_{role.upper()}")
        bindings.put(RoleBinding(identity=identity, role=number, users=" ".join(users)))
    return Authorization(bindings)


def call(identity: str, *users: str, is_local_admin: bool = False) -> tuple[Caller, grpc.aio.ServicerContext]:  # type: ignore[type-arg]
    """A call of an identity, with these values of the metadata."""

    class Context:
        def invocation_metadata(self) -> list[tuple[str, str]]:
            return [(ON_BEHALF_OF_KEY, user) for user in users]

    caller = Caller(parse_identity(identity), "ipv4:10.0.0.1", is_local_admin=is_local_admin)
    return caller, cast("grpc.aio.ServicerContext[object, object]", Context())


def authorize(
    authorization: Authorization, method: str, *arguments: str, is_local_admin: bool = False
) -> Caller:
    """The caller of a call that is authorized."""
    acting = authorization.acting(*call(*arguments, is_local_admin=is_local_admin))
    return authorization.authorize(method, acting)


def refused(authorization: Authorization, method: str, identity: str, *users: str) -> str:
    """The reason of a refusal."""
    with pytest.raises(FleetError) as error:
        authorize(authorization, method, identity, *users)
    return reason_name(error.value.reason)


def test_the_strongest_role_counts_and_a_method_without_a_row_is_refused() -> None:
    authorization = bound("user/ann viewer", "user/ann operator", "local/ann admin")
    assert authorize(authorization, CORDON, "user/ann").role is Role.OPERATOR
    assert refused(authorization, "/leasehold.v1.FleetService/Unknown", "local/ann") == "NOT_PERMITTED"
    assert refused(authorization, LIST, "user/Ann") == "NOT_PERMITTED"
    assert refused(authorization, LIST, "service/ann") == "NOT_PERMITTED"


def test_admins_by_the_kernel_need_no_binding() -> None:
    assert authorize(bound(), CORDON, "local/root", is_local_admin=True).role is Role.ADMIN
    assert refused(bound(), CORDON, "local/root") == "NOT_PERMITTED"


@pytest.mark.parametrize(
    ("service", "user", "role"),
    [
        ("admin", "admin", Role.USER),
        ("operator", "user", Role.USER),
        ("viewer", "admin", Role.VIEWER),
        ("user", "viewer", Role.VIEWER),
    ],
)
def test_on_behalf_of_a_user_counts_the_weaker_role(service: str, user: str, role: Role) -> None:
    authorization = bound(
        f"service/batch {service}", "service/batch on_behalf_of user/a*", f"user/ann {user}"
    )
    caller = authorize(authorization, LIST, "service/batch", "user/ann")
    assert (caller.role, str(caller.owner), str(caller)) == (
        role,
        "user/ann",
        "service/batch for user/ann",
    )
    assert not caller.sees_all


def test_on_behalf_of_needs_all_three_bindings() -> None:
    every = ["service/batch user", "service/batch on_behalf_of user/ann", "user/ann user"]
    for lacking in every:
        authorization = bound(*(one for one in every if one != lacking))
        assert refused(authorization, LIST, "service/batch", "user/ann") == "NOT_PERMITTED"
    authorization = bound(*every, "user/ben user", "service/other user", "user/eve admin")
    assert refused(authorization, LIST, "service/batch", "user/ben") == "NOT_PERMITTED"
    assert refused(authorization, LIST, "service/other", "user/ann") == "NOT_PERMITTED"
    assert refused(authorization, LIST, "user/eve", "user/ann") == "NOT_PERMITTED"
    # Otherwise, the answer would tell a service whether a user is blocked.
    assert refused(authorization, WHO_AM_I, "service/other", "user/ann") == "NOT_PERMITTED"
    assert authorize(authorization, WHO_AM_I, "service/none").role is Role.NONE


def test_on_behalf_of_names_one_user() -> None:
    authorization = bound("service/batch user", "service/batch on_behalf_of user/*", "user/ann user")
    for users in (("user/ann", "user/ann"), ("local/ann",), ("ann",), ("",), ("user/*",)):
        assert refused(authorization, CREATE, "service/batch", *users) == "INVALID_ARGUMENT"


def test_a_claimed_role_is_in_addition_to_bindings() -> None:
    for claimed, text, role in (
        (Role.OPERATOR, "user/a viewer", Role.OPERATOR),
        (Role.VIEWER, "user/a admin", Role.ADMIN),
        (Role.USER, "user/b admin", Role.USER),
    ):
        caller = Caller(parse_identity("user/a"), "ipv4:10.0.0.1", claimed_role=claimed)
        assert bound(text).role(caller) is role
