"""The ``leasehold`` command, and the Python client of the coordinator.

with Client("127.0.0.1:7400") as client:
    command = client.suspend("trainer")
    print(client.wait(command).result.released_gpu_uuids)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leasehold_client.client import Client as Client
    from leasehold_client.errors import LeaseholdError as LeaseholdError
    from leasehold_client.errors import NoCoordinatorError as NoCoordinatorError
    from leasehold_client.errors import NotYetError as NotYetError

__version__ = "0.1.0"

__all__ = ["Client", "LeaseholdError", "NoCoordinatorError", "NotYetError", "__version__"]


def __getattr__(name: str) -> object:
    # Imported when they are first used: `leasehold --help` needs no gRPC.
    if name == "Client":
        from leasehold_client.client import Client

        return Client
    if name in ("LeaseholdError", "NoCoordinatorError", "NotYetError"):
        from leasehold_client import errors

        return getattr(errors, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
