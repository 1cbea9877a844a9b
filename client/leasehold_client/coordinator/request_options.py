"""Options of requests that most methods of the client share."""

from typing import TypedDict


class RequestOptions(TypedDict, total=False):
    """Options of every request that creates a command."""

    request_id: str
    """A repeated request with this id returns the command of the first one. Absent: an id per call."""


class CreateOptions(RequestOptions, total=False):
    """Options of a request that creates a workload."""

    validate_only: bool
    """Check the request and create nothing. The returned command is then empty."""


class ChangeOptions(RequestOptions, total=False):
    """Options of a request that changes a workload."""

    expected_generation: int
    """Refuse with GENERATION_MISMATCH if the workload has another generation. Absent: any generation."""


class PlannedOptions(CreateOptions, ChangeOptions, total=False):
    """Options of a request that changes a workload and can be validated."""
