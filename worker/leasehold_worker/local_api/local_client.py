"""A client of the local API, for the diagnostics of this package."""

from pathlib import Path
from typing import cast

import grpc
from leasehold.local.v1.local_service_pb2 import ListRequest, ListResponse
from leasehold.local.v1.local_service_pb2_grpc import LocalServiceStub


def list_leases(path: Path, timeout_s: float) -> ListResponse:
    """The answer of the worker at a socket. Blocks for the timeout at most.

    Raises:
        OSError: No worker answers there, or it refuses.
    """
    with grpc.insecure_channel(f"unix:{path}") as channel:
        try:
            return LocalServiceStub(channel).List(ListRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise OSError(cast("grpc.Call", error).details()) from None  # an error of a call is the call too
