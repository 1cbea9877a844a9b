"""No secret of a request gets into the audit."""

import importlib
import re

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pool import Default as default_pool
from leasehold.v1.operation_pb2 import Operation, RunOperation
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest, StopWorkloadRequest
from leasehold_coordinator.access.methods import CHANGES
from leasehold_coordinator.core.redaction import HIDDEN, REDACTED, without_secrets

SECRET_NAME = re.compile(r"secret|token|password|passw|key|csr|environment|credential|private|certificate")

HARMLESS = {
    "leasehold.v1.DeleteJoinTokenRequest.join_token_id",
    "leasehold.v1.HookCredential.environment_variable",
    "leasehold.v1.HttpHook.credential",
    "leasehold.v1.Lease.fencing_token",
    "leasehold.v1.SglangHook.credential",
    "leasehold.v1.VllmHook.credential",
}
"""Fields whose names sound like secrets, and which have none."""


def requests() -> list[Descriptor]:
    """The requests of all methods that change something."""
    importlib.import_module("leasehold_coordinator.server.listeners")  # knows all services
    pool = default_pool()
    named = [method.strip("/").split("/") for method in CHANGES]
    return [pool.FindServiceByName(service).methods_by_name[name].input_type for service, name in named]


def fields(message: Descriptor, seen: set[str]) -> set[FieldDescriptor]:
    """All fields within a message."""
    if message.full_name in seen or message.GetOptions().map_entry:
        return set()
    seen.add(message.full_name)
    found = set(message.fields)
    for field in message.fields:
        if field.message_type is not None:
            found |= fields(field.message_type, seen)
    return found


def test_each_field_that_sounds_like_a_secret_is_redacted_or_harmless() -> None:
    seen: set[str] = set()
    names = {field.full_name for message in requests() for field in fields(message, seen)}
    suspicious = {name for name in names if SECRET_NAME.search(name.rpartition(".")[2])}
    assert suspicious <= REDACTED | HARMLESS
    assert names >= REDACTED, "a redacted field is gone, or has another name"


def test_values_are_hidden_and_keys_stay() -> None:
    spec = WorkloadSpec(arguments=["program"], environment={"A": "secret", "B": "secret"})
    shown = without_secrets(CreateWorkloadRequest(name="one", spec=spec))
    assert isinstance(shown, CreateWorkloadRequest)
    assert dict(shown.spec.environment) == {"A": HIDDEN, "B": HIDDEN}
    assert (shown.name, list(shown.spec.arguments)) == ("one", ["program"])
    assert dict(spec.environment) == {"A": "secret", "B": "secret"}, "the request itself stays"
    inner = without_secrets(Operation(run=RunOperation(spec=spec)))
    assert "secret" not in str(inner)
    request = StopWorkloadRequest(workload="one")
    assert without_secrets(request) is request
