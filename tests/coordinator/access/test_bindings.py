"""The role bindings in memory."""

import pytest
from leasehold.v1.access_service_pb2 import (
    ROLE_ADMIN,
    ROLE_ON_BEHALF_OF,
    ROLE_OPERATOR,
    ROLE_USER,
    ROLE_VIEWER,
    RoleBinding,
)
from leasehold.v1.access_service_pb2 import Role as BoundRole
from leasehold_coordinator.access.bindings import Bindings, check_binding
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.errors import FleetError


@pytest.mark.parametrize(
    ("roles", "strongest"),
    [
        ([], Role.NONE),
        ([ROLE_VIEWER], Role.VIEWER),
        ([ROLE_USER, ROLE_VIEWER], Role.USER),
        ([ROLE_OPERATOR, ROLE_ON_BEHALF_OF], Role.OPERATOR),
        ([ROLE_ADMIN], Role.ADMIN),
        ([ROLE_ON_BEHALF_OF], Role.NONE),
    ],
)
def test_a_role_includes_the_weaker_ones(roles: list[BoundRole.ValueType], strongest: Role) -> None:
    bindings = Bindings()
    bindings.load(RoleBinding(identity="service/ci", role=role, users="user/*") for role in roles)
    has = [role for role in Role if role and bindings.has_role("service/ci", role)]
    assert has == [role for role in Role if Role.NONE < role <= strongest]
    assert not bindings.has_role("user/other", Role.VIEWER)


def test_a_refused_identity_suggests_no_worker() -> None:
    with pytest.raises(FleetError) as refused:
        check_binding(RoleBinding(identity="alice", role=ROLE_VIEWER))
    assert str(refused.value).endswith("write one of local/NAME, user/NAME, service/NAME")
    with pytest.raises(FleetError, match="worker/alpha can't have a role"):
        check_binding(RoleBinding(identity="worker/alpha", role=ROLE_VIEWER))
