"""Contact with the coordinator: since when it is away, why it refuses, and the caller's role. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field

from leasehold.v1.access_service_pb2 import Role, WhoAmIResponse

from leasehold_client.aio.retry import is_outage
from leasehold_client.errors import LeaseholdError
from leasehold_client.messages import enum_name


@dataclass(slots=True)
class Contact:
    """The state of the connection.

    Attributes:
        clock: Seconds of a monotonic clock.
        lost_since: Time at which calls began to fail. None: the last call was answered.
        problem: Why the last call was not answered. Empty: it was.
        refusals: Why the coordinator refuses to show a part of the fleet, by the watch of the part.
        caller: The caller's identity and role, as last told.
    """

    clock: Callable[[], float]
    lost_since: float | None = None
    problem: str = ""
    refusals: dict[str, str] = field(default_factory=dict)
    caller: WhoAmIResponse = field(default_factory=WhoAmIResponse)

    def failed(self, error: LeaseholdError) -> None:
        """A call failed. Only an outage means that the coordinator is away."""
        if not error.reason:  # a refusal with a reason is an answer
            self.problem = error.message
        if is_outage(error) and self.lost_since is None:
            self.lost_since = self.clock()

    def answered(self, caller: WhoAmIResponse) -> bool:
        """A call was answered. Returns whether the coordinator was away before."""
        was_away = self.lost_since is not None
        self.lost_since = None
        self.problem = ""
        self.caller = caller
        return was_away

    @property
    def refusal(self) -> str:
        """Why the coordinator refuses to show the fleet, or a part of it. Empty: it does not."""
        return next(iter(self.refusals.values()), "")

    @property
    def role(self) -> str:
        """The name of the caller's role, such as ``viewer``. Empty: none."""
        return enum_name(Role.Name, self.caller.role, "ROLE_").lower() if self.caller.role else ""

    def not_permitted(self, action: str, needed: Role.ValueType) -> str:
        """Why the role does not permit an action. Empty: it does, and the coordinator checks the owner.

        Args:
            action: The action as a word, such as ``suspend``.
            needed: The weakest role that permits the action.
        """
        if self.caller.role >= needed:
            return ""
        role = enum_name(Role.Name, needed, "ROLE_").lower()
        who = self.caller.on_behalf_of or self.caller.identity
        has = f"has the role {self.role}" if self.role else "has no role"
        return (
            f"{action} needs the role {role}, and {who} {has}: ask an admin for "
            f"`leasehold access grant {role} {who}`"
        )
