"""The parser of requests, which writes nothing to the log: any user could fill the log by malformed ones."""

from typing import TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtoMessage

Message = TypeVar("Message", bound=ProtoMessage)


def parse(kind: type[Message], data: bytes) -> Message | None:
    """A request, without unknown fields: nothing else would bound what a workload's reports repeat.

    None: the bytes are malformed, and gRPC ends the call with INTERNAL. An exception would have its traceback
    in the log.
    """
    try:
        request = kind.FromString(data)
    except DecodeError:
        return None
    request.DiscardUnknownFields()
    return request
