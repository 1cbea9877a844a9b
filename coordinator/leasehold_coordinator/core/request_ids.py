"""Ids of requests, each in the namespace of the identity that sends it. Pure."""

from leasehold.v1.command_pb2 import Command


def scoped(actor: str, on_behalf_of: str, request_id: str) -> str:
    """A request id with its identities, which have no spaces. Empty: the request has no id."""
    return f"{actor} {on_behalf_of} {request_id}" if request_id else ""


def scoped_id(command: Command) -> str:
    """The scoped id of the request that created a command. Empty: the request had none."""
    return scoped(command.actor, command.on_behalf_of, command.request_id)
