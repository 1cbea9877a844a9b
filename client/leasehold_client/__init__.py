"""The ``leasehold`` command, and the Python client of the coordinator.

Example::

    with Client() as client:
        command = client.wait(client.suspend("trainer"), timeout_s=60)
        print(command.result.released_gpu_uuids)

``wait`` raises :class:`CommandFailedError` unless the command succeeds. :class:`AsyncClient` has the same
methods for asyncio. Arguments and results are messages of the API: this package has the ones that programs
use most, and ``leasehold.v1`` has all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from leasehold_client.errors import (
    CommandFailedError,
    CommandWaitTimeoutError,
    LeaseholdError,
    NoCoordinatorError,
    UsageError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from leasehold.v1.command_pb2 import Command as Command
    from leasehold.v1.command_pb2 import CommandState as CommandState
    from leasehold.v1.errors_pb2 import ErrorReason as ErrorReason
    from leasehold.v1.event_pb2 import Event as Event
    from leasehold.v1.eviction_pb2 import EvictionPolicy as EvictionPolicy
    from leasehold.v1.hook_pb2 import Hook as Hook
    from leasehold.v1.worker_pb2 import FleetGpu as FleetGpu
    from leasehold.v1.worker_pb2 import Worker as Worker
    from leasehold.v1.workload_pb2 import Workload as Workload
    from leasehold.v1.workload_pb2 import WorkloadSpec as WorkloadSpec
    from leasehold.v1.workload_pb2 import WorkloadState as WorkloadState

    from leasehold_client.aio.client import AsyncClient as AsyncClient
    from leasehold_client.coordinator.client import Client as Client

__version__ = "0.1.0"

_LATE: Final = {
    "AsyncClient": "leasehold_client.aio.client",
    "Client": "leasehold_client.coordinator.client",
    "Command": "leasehold.v1.command_pb2",
    "CommandState": "leasehold.v1.command_pb2",
    "ErrorReason": "leasehold.v1.errors_pb2",
    "Event": "leasehold.v1.event_pb2",
    "EvictionPolicy": "leasehold.v1.eviction_pb2",
    "FleetGpu": "leasehold.v1.worker_pb2",
    "Hook": "leasehold.v1.hook_pb2",
    "Worker": "leasehold.v1.worker_pb2",
    "Workload": "leasehold.v1.workload_pb2",
    "WorkloadSpec": "leasehold.v1.workload_pb2",
    "WorkloadState": "leasehold.v1.workload_pb2",
}
"""Modules of names that are imported when they are used: `leasehold --help` needs no gRPC."""

__all__ = [
    "AsyncClient",
    "Client",
    "Command",
    "CommandFailedError",
    "CommandState",
    "CommandWaitTimeoutError",
    "ErrorReason",
    "Event",
    "EvictionPolicy",
    "FleetGpu",
    "Hook",
    "LeaseholdError",
    "NoCoordinatorError",
    "UsageError",
    "WaitTimeoutError",
    "Worker",
    "Workload",
    "WorkloadSpec",
    "WorkloadState",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
