"""The rules for a run that need no look at the host. Pure."""

from typing import Final

from leasehold.v1 import operation_pb2

from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.hooks.validation import check_hooks
from leasehold_worker.leasing.allocation import AllocRequest
from leasehold_worker.workloads.eviction import resolve

_RESOURCES: Final = "spec.resources"


def check_run(operation: operation_pb2.RunOperation) -> None:
    """Refuses a run that no worker could begin.

    Raises:
        OperationError: INVALID_ARGUMENT; metadata "field" names the field, such as ``spec.hooks[0].phase``.
    """
    spec = operation.spec
    if not spec.arguments:
        raise invalid("spec.arguments", "a workload needs a program: give its arguments")
    resolve(None, spec.eviction)
    check_hooks(spec.hooks, "spec.hooks")
    try:
        AllocRequest.of(spec.resources).validate()
    except OperationError as error:
        field = f"{_RESOURCES}.{error.metadata['field']}" if "field" in error.metadata else _RESOURCES
        raise invalid(field, error.message) from None
