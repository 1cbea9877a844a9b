"""Each method of each service has a row."""

import importlib
import pkgutil

import leasehold
import pytest
from google.protobuf.descriptor_pool import Default as default_pool
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from leasehold_coordinator.access.methods import CHANGES, METHODS, permits
from leasehold_coordinator.access.roles import Credential, Role


def methods(pool: DescriptorPool, service: str) -> set[str]:
    """The full names of a service's methods."""
    return {f"/{service}/{method.name}" for method in pool.FindServiceByName(service).methods}


def own_services() -> set[str]:
    """The full names of all services of our protos."""
    modules = pkgutil.walk_packages(leasehold.__path__, f"{leasehold.__name__}.")
    files = (importlib.import_module(module.name) for module in modules if module.name.endswith("_pb2"))
    return {service.full_name for file in files for service in file.DESCRIPTOR.services_by_name.values()}


def test_every_method_has_a_row_and_every_row_a_method() -> None:
    names = (
        *own_services(),
        *(service.full_name for service in health_pb2.DESCRIPTOR.services_by_name.values()),
        *(service.full_name for service in reflection_pb2.DESCRIPTOR.services_by_name.values()),
    )
    served = set().union(*(methods(default_pool(), name) for name in names))
    assert set(METHODS) == served


def test_the_services_of_all_packages_are_found() -> None:
    assert {name.rpartition(".")[0] for name in own_services()} == {
        "leasehold.v1",
        "leasehold.worker.v1",
        "leasehold.local.v1",
    }


@pytest.mark.parametrize("held", [*Role, *Credential])
def test_nobody_may_call_a_method_without_a_row(held: Role | Credential) -> None:
    assert not permits("/leasehold.v1.FleetService/New", held)
    assert not permits("", held)


def test_roles_are_those_of_clients_and_credentials_those_of_their_listeners() -> None:
    permitted = {
        held: {method.rpartition("/")[2] for method in METHODS if permits(method, held)}
        for held in (*Role, *Credential)
    }
    assert permitted[Role.NONE] == {"WhoAmI", "RenewCertificate"}
    for weaker, stronger in zip(Role, list(Role)[1:], strict=False):
        assert permitted[weaker] < permitted[stronger]
    assert permitted[Credential.WORKER] == {"Connect", "RenewCertificate"}
    assert permitted[Credential.JOIN_TOKEN] == {"Join"}
    assert permitted[Credential.HOST_USER] == {"Claim", "List", "Release", "ServeKernel"}


def test_the_methods_of_workers_hosts_are_no_changes_of_the_coordinator() -> None:
    assert not any(METHODS[method] is Credential.HOST_USER for method in CHANGES)
    assert {"Join", "Connect"} <= {method.rpartition("/")[2] for method in CHANGES}


def test_who_only_looks_changes_nothing() -> None:
    reading = ("Get", "List", "Watch", "Check", "ServerReflectionInfo")
    for method, role in METHODS.items():
        name = method.rpartition("/")[2]
        if role is Role.VIEWER and name != "RenewCertificate":  # which changes the caller's own
            assert name.startswith(reading), method
