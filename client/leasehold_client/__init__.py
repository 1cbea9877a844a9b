"""The ``leasehold`` command, and the Python client of the coordinator.

with Client("127.0.0.1:7400") as client:
    command = client.suspend("trainer")
    print(client.wait(command).result.released_gpu_uuids)
"""

from leasehold_client.client import Client
from leasehold_client.errors import LeaseholdError, NoCoordinatorError

__version__ = "0.1.0"

__all__ = ["Client", "LeaseholdError", "NoCoordinatorError", "__version__"]
