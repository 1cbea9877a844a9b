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
from leasehold_coordinator.access.bindings import Bindings
from leasehold_coordinator.access.roles import Role


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
