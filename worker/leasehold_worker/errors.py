"""Errors and refusals of a worker, in their form on the wire."""

from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason


class OperationError(Exception):
    """An operation was refused, or failed.

    Names of files and of control groups may be no UTF-8, which no message on the wire can hold. The texts
    have escapes in the place of such bytes.

    Attributes:
        reason: The typed reason of the wire.
        message: One sentence for a person: the value, the rule and the remedy.
        metadata: Facts for programs, under the names that docs/errors.md lists.
    """

    def __init__(
        self, reason: ErrorReason.ValueType, message: str, metadata: dict[str, str] | None = None
    ) -> None:
        self.reason = reason
        self.message = _escaped(message)
        self.metadata = {name: _escaped(value) for name, value in (metadata or {}).items()}
        super().__init__(self.message)

    def to_proto(self) -> errors_pb2.Error:
        """The same error as a message."""
        return errors_pb2.Error(reason=self.reason, message=self.message, metadata=self.metadata)


def _escaped(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def defect() -> OperationError:
    """The error of a defect in the worker; its log has the details."""
    return OperationError(
        errors_pb2.ERROR_REASON_INTERNAL, "this is a defect of Leasehold: see the worker's log"
    )


class StartError(Exception):
    """The worker can't start; the text has the reason and the remedy."""


def invalid(field_name: str, message: str) -> OperationError:
    """The error of an invalid field in a request."""
    return OperationError(errors_pb2.ERROR_REASON_INVALID_ARGUMENT, message, {"field": field_name})
