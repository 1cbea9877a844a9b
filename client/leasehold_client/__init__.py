"""The ``leasehold`` command, and the Python client of the coordinator.

Example::

    with Client() as client:
        command = client.wait(client.suspend("trainer"), timeout_s=60)
        print(command.result.released_gpu_uuids)

``wait`` raises :class:`CommandFailedError` unless the command succeeds.
"""

from typing import TYPE_CHECKING

from leasehold_client.errors import (
    CommandFailedError,
    CommandWaitTimeoutError,
    LeaseholdError,
    NoCoordinatorError,
    WaitTimeoutError,
)

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client as Client

__version__ = "0.1.0"

__all__ = [
    "Client",
    "CommandFailedError",
    "CommandWaitTimeoutError",
    "LeaseholdError",
    "NoCoordinatorError",
    "WaitTimeoutError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "Client":
        from leasehold_client.coordinator.client import Client  # late: imports gRPC

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
