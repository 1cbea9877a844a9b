"""Role bindings, and the identity of the caller."""

from typing import Final

from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding, WhoAmIResponse

from leasehold_client.aio.reader import AsyncReader
from leasehold_client.errors import UsageError
from leasehold_client.request_fields import build, value_text

ROLES: Final = {
    name.removeprefix("ROLE_").lower(): number
    for name, number in access_service_pb2.Role.items()
    if number != access_service_pb2.ROLE_UNSPECIFIED
}
"""The roles by their names on the command line."""


class AsyncAccessChanges(AsyncReader):
    """A connection to one coordinator, for reads and changes of role bindings."""

    async def who_am_i(self) -> WhoAmIResponse:
        """Identity and role of the caller."""
        return await self._connection.read(self._access.WhoAmI, access_service_pb2.WhoAmIRequest())

    async def bindings(self) -> list[RoleBinding]:
        """All role bindings, by identity. For admins."""
        request = access_service_pb2.ListBindingsRequest()
        response = await self._connection.read(self._access.ListBindings, request)
        return list(response.bindings)

    async def grant(self, role: str, identity: str, *, users: str = "") -> RoleBinding:
        """Gives a role to an identity. The role is effective at once.

        Args:
            role: One of :data:`ROLES`.
            identity: ``local/LOGIN``, ``user/NAME`` or ``service/NAME``.
            users: Pattern of the users for whom a service may act, such as ``user/*``: for the role
                ``on_behalf_of``, and empty for others.

        Raises:
            UsageError: The role does not exist.
        """
        request = build(access_service_pb2.GrantRequest, binding=_binding(role, identity, users))
        response = await self._connection.read(self._access.Grant, request)
        return response.binding

    async def revoke(self, role: str, identity: str, *, users: str = "") -> None:
        """Takes a role from an identity. Streams that the role permitted end at once.

        Args:
            role: As for :meth:`grant`.
            identity: As for :meth:`grant`.
            users: As for :meth:`grant`.

        Raises:
            UsageError: The role does not exist.
        """
        request = build(access_service_pb2.RevokeRequest, binding=_binding(role, identity, users))
        # A repeated call would not find the binding.
        await self._connection.change(self._access.Revoke, request)


def _binding(role: str, identity: str, users: str) -> RoleBinding:
    if role not in ROLES:
        raise UsageError(f"unknown role {value_text(role)}: choose {', '.join(ROLES)}")
    return build(RoleBinding, role=ROLES[role], identity=identity, users=users)
