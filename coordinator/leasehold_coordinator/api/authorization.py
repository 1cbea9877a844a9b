"""The permission to call a method: the row of the method, and the role of the caller."""

from dataclasses import replace
from typing import Any, Final, final

import grpc
from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.bindings import Bindings
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind, parse_identity
from leasehold_coordinator.access.methods import METHODS, permits
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.errors import FleetError, invalid

Context = grpc.aio.ServicerContext[Any, Any]

ON_BEHALF_OF_KEY: Final = "leasehold-on-behalf-of"
"""Metadata of a call with the user for whom a service acts."""


@final
class Authorization:
    """Decides which methods callers may call.

    Args:
        bindings: The role bindings.
    """

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings

    def acting(self, caller: Caller, context: Context) -> Caller:
        """The caller with the user for whom it says that it acts.

        Raises:
            FleetError: INVALID_ARGUMENT, for that user.
        """
        user = _on_behalf_of(context)
        return caller if user is None else replace(caller, on_behalf_of=user)

    def authorize(self, method: str, caller: Caller) -> Caller:
        """The caller with its present role, if the role may call the method by now.

        Raises:
            FleetError: NOT_PERMITTED.
        """
        found = replace(caller, role=self.role(caller))
        require_role(method, found)
        return found

    def role(self, caller: Caller) -> Role:
        """The present role of a caller. A service that acts for a user has the weaker role of both.

        The role is NONE if the service may not act for the user.
        """
        own = max(self._bindings.role(caller.identity), caller.claimed_role)
        if caller.is_local_admin:
            own = Role.ADMIN
        if caller.on_behalf_of is None:
            return own
        if not self._bindings.may_act_for(caller.identity, caller.on_behalf_of):
            return Role.NONE
        return min(own, self._bindings.role(caller.on_behalf_of), Role.USER)


def require_role(method: str, caller: Caller) -> None:
    """Refuses a call that the caller's role does not permit.

    Raises:
        FleetError: NOT_PERMITTED.
    """
    # A service without permission learns nothing of the user, not even by a method that needs no role.
    may_act = caller.on_behalf_of is None or caller.role is not Role.NONE
    if permits(method, caller.role) and may_act:
        return
    needed = METHODS.get(method)
    if caller.on_behalf_of is not None and caller.identity.kind is not Kind.SERVICE:
        message = f"only services act for users, and {caller.identity} is none: call without --as"
    elif caller.on_behalf_of is not None and caller.role is Role.NONE:
        message = (
            f"{caller.identity} may not act for {caller.on_behalf_of}, or one of them has no role: an admin "
            f"permits it with `leasehold access grant on_behalf_of {caller.identity} --users "
            f"{caller.on_behalf_of}`, and gives roles with `leasehold access grant`"
        )
    elif caller.identity.kind is Kind.WORKER:
        message = f"{caller.identity} is a worker, which never has a role: call with a certificate of a user"
    elif caller.role is Role.NONE:
        message = (
            f"{caller.identity} has no role: ask an admin for `leasehold access grant user {caller.identity}`"
        )
    elif not isinstance(needed, Role):
        message = f"no role may call {method}"
    else:
        name, role = method.rpartition("/")[2], needed.name.lower()
        message = (
            f"{name} needs the role {role}, and {caller} has the role {caller.role.name.lower()}: ask an "
            f"admin for `leasehold access grant {role} {caller.owner}`"
        )
    raise FleetError(errors_pb2.ERROR_REASON_NOT_PERMITTED, message, identity=str(caller.identity))


def _on_behalf_of(context: Context) -> Identity | None:
    """The user for whom a call is made.

    Raises:
        FleetError: INVALID_ARGUMENT.
    """
    values = [value for key, value in context.invocation_metadata() or () if key == ON_BEHALF_OF_KEY]
    if not values:
        return None
    if len(values) > 1 or not isinstance(values[0], str):
        raise invalid(ON_BEHALF_OF_KEY, f"the call names several users: send {ON_BEHALF_OF_KEY} once")
    try:
        user = parse_identity(values[0])
    except ValueError as error:
        raise invalid(ON_BEHALF_OF_KEY, str(error)) from None
    if user.kind is not Kind.USER:
        raise invalid(ON_BEHALF_OF_KEY, f"{user} is no user: name user/NAME")
    return user
