"""The ``leasehold`` command, and the Python client of the coordinator.

with Client("127.0.0.1:7400") as client:
    command = client.suspend("trainer")
    print(client.wait(command).result.released_gpu_uuids)
"""

from typing import TYPE_CHECKING

from leasehold_client.errors import LeaseholdError, NoCoordinatorError, NotYetError

if TYPE_CHECKING:
    from leasehold_client.coordinator.client import Client as Client

__version__ = "0.1.0"

__all__ = ["Client", "LeaseholdError", "NoCoordinatorError", "NotYetError", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Client":
        from leasehold_client.coordinator.client import Client  # late: `leasehold --help` needs no gRPC

        return Client
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
