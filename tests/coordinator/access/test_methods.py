"""Each method that clients may call has a role."""

from google.protobuf.descriptor_pool import Default as default_pool
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from leasehold_coordinator.access.methods import METHODS
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.server.listeners import SERVICES


def methods(pool: DescriptorPool, service: str) -> set[str]:
    """The full names of a service's methods."""
    return {f"/{service}/{method.name}" for method in pool.FindServiceByName(service).methods}


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    names = (
        *SERVICES,
        *(service.full_name for service in health_pb2.DESCRIPTOR.services_by_name.values()),
        *(service.full_name for service in reflection_pb2.DESCRIPTOR.services_by_name.values()),
    )
    served = set().union(*(methods(default_pool(), name) for name in names))
    assert set(METHODS) == served


def test_who_only_looks_changes_nothing() -> None:
    reading = ("Get", "List", "Watch", "Check", "ServerReflectionInfo")
    for method, role in METHODS.items():
        name = method.rpartition("/")[2]
        if role is Role.VIEWER and name != "RenewCertificate":  # which changes the caller's own
            assert name.startswith(reading), method
