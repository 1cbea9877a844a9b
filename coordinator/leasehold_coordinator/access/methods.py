"""The callers of each method, and the fields that name resources. A method without a row is refused."""

from typing import Final

from leasehold_coordinator.access.roles import Credential, Role

_ROWS: Final[dict[str, dict[str, tuple[Role | Credential, *tuple[str, ...]]]]] = {
    "leasehold.v1.FleetService": {
        "GetWorker": (Role.VIEWER, "worker/worker"),
        "ListWorkers": (Role.VIEWER,),
        "GetGpu": (Role.VIEWER, "gpu/uuid"),
        "ListGpus": (Role.VIEWER, "worker/worker"),
        "WatchFleet": (Role.VIEWER,),
        "Cordon": (Role.OPERATOR, "worker/worker", "gpu/operation.gpu_uuids"),
        "Uncordon": (Role.OPERATOR, "worker/worker", "gpu/operation.gpu_uuids"),
        "ResetGpuHealth": (Role.OPERATOR, "worker/worker", "gpu/operation.gpu_uuids"),
        "DeleteWorker": (Role.ADMIN, "worker/worker"),
    },
    "leasehold.v1.WorkloadService": {
        "CreateWorkload": (
            Role.USER,
            "worker/worker",
            "hold/hold_id",
            "checkpoint/checkpoint_id",
            "workload/preempt",
            "gpu/gpu_uuids",
        ),
        "GetWorkload": (Role.VIEWER, "workload/workload"),
        "ListWorkloads": (Role.VIEWER, "worker/worker"),
        "WatchWorkloads": (Role.VIEWER, "workload/workload"),
        "UpdateWorkload": (Role.USER, "workload/workload.workload_id"),
        "DeleteWorkload": (Role.USER, "workload/workload"),
        "SuspendWorkload": (Role.USER, "workload/workload"),
        "SuspendWorker": (Role.OPERATOR, "worker/worker"),
        "RestoreWorkload": (
            Role.USER,
            "workload/workload",
            "hold/operation.hold_id",
            "checkpoint/operation.checkpoint_id",
            "workload/operation.preempt",
            "gpu/operation.gpu_uuids",
        ),
        "RemapWorkloads": (Role.USER, "workload/operation.moves.workload_id"),
        "Plan": (
            Role.USER,
            "workload/workload",
            "hold/restore.hold_id",
            "checkpoint/restore.checkpoint_id",
            "workload/restore.preempt",
            "workload/remap.moves.workload_id",
            "gpu/restore.gpu_uuids",
        ),
        "CheckpointWorkload": (Role.USER, "workload/workload"),
        "ListCheckpoints": (Role.USER, "workload/workload", "worker/worker"),
        "DeleteCheckpoints": (Role.USER, "worker/worker", "checkpoint/operation.checkpoint_ids"),
        "ReleaseHold": (Role.USER, "hold/hold_id"),
        "StopWorkload": (Role.USER, "workload/workload"),
        "AdoptProcess": (Role.OPERATOR, "worker/worker"),
        "ReleaseWorkload": (Role.USER, "workload/workload"),
        "ReadWorkloadOutput": (Role.USER, "workload/workload"),
    },
    "leasehold.v1.CommandService": {
        "GetCommand": (Role.VIEWER, "command/command_id"),
        "ListCommands": (Role.VIEWER, "workload/workload"),
        "WatchCommand": (Role.VIEWER, "command/command_id"),
        "WatchCommands": (Role.VIEWER, "workload/workload", "worker/worker"),
        "CancelCommand": (Role.USER, "command/command_id"),
    },
    "leasehold.v1.EventService": {
        "ListEvents": (Role.VIEWER, "workload/workload", "worker/worker"),
        "WatchEvents": (Role.VIEWER, "workload/workload", "worker/worker"),
        "ListLeaseHistory": (Role.VIEWER, "workload/workload", "worker/worker", "gpu/gpu_uuid"),
    },
    "leasehold.v1.AuditService": {
        "ListAuditEntries": (Role.OPERATOR,),
        "VerifyAudit": (Role.OPERATOR,),
    },
    "leasehold.v1.EnrolmentService": {
        "CreateJoinToken": (Role.ADMIN, "identity/identity"),
        "ListJoinTokens": (Role.ADMIN,),
        "DeleteJoinToken": (Role.ADMIN, "join_token/join_token_id"),
        "UnbindGpu": (Role.ADMIN, "gpu/gpu_uuid"),
    },
    "leasehold.v1.JoinService": {
        "Join": (Credential.JOIN_TOKEN, "identity/identity", "worker/worker_id", "gpu/gpu_uuids"),
    },
    "leasehold.v1.RenewalService": {"RenewCertificate": (Credential.IDENTITY,)},
    "leasehold.v1.CertificateService": {
        "ListCertificates": (Role.ADMIN,),
        "RevokeCertificate": (Role.ADMIN, "certificate/serial"),
        "ListBlocks": (Role.ADMIN,),
        "BlockIdentity": (Role.ADMIN, "block/identity"),
        "UnblockIdentity": (Role.ADMIN, "block/identity"),
        "ListAuthorities": (Role.ADMIN,),
        "RotateAuthority": (Role.ADMIN,),
        "RetireAuthority": (Role.ADMIN, "authority/serial"),
    },
    "leasehold.v1.AccessService": {
        "Grant": (Role.ADMIN, "binding/binding.identity"),
        "Revoke": (Role.ADMIN, "binding/binding.identity"),
        "ListBindings": (Role.ADMIN,),
        "WhoAmI": (Role.NONE,),
    },
    "leasehold.worker.v1.SessionService": {"Connect": (Credential.WORKER,)},
    "leasehold.local.v1.LocalService": {
        "Claim": (Credential.HOST_USER,),
        "List": (Credential.HOST_USER,),
        "Release": (Credential.HOST_USER,),
        "ServeKernel": (Credential.HOST_USER,),
    },
    "grpc.health.v1.Health": {
        "Check": (Role.VIEWER,),
        "List": (Role.VIEWER,),
        "Watch": (Role.VIEWER,),
    },
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": (Role.VIEWER,)},
}

METHODS: Final = {
    f"/{service}/{method}": row[0] for service, methods in _ROWS.items() for method, row in methods.items()
}
"""The weakest role or the credential that may call a method, by the method's full name."""

NAMES: Final = {
    f"/{service}/{method}": row[1:]
    for service, methods in _ROWS.items()
    for method, row in methods.items()
    if row[0] is not Credential.HOST_USER
}
"""The fields of a method's request that name resources, each as KIND/PATH, by the method's full name.

Every method of the coordinator is a key.
"""

_READING_VERBS: Final = ("Get", "List", "Watch")
_READING: Final = frozenset(
    {"Check", "Plan", "ReadWorkloadOutput", "VerifyAudit", "WhoAmI", "ServerReflectionInfo"}
)
"""Further methods that change nothing. A new method counts as one that changes something."""

CHANGES: Final = frozenset(
    method
    for method in NAMES
    if not (name := method.rpartition("/")[2]).startswith(_READING_VERBS) and name not in _READING
)
"""The methods of the coordinator that change something, by full name. Each change writes an audit row."""


def permits(method: str, held: Role | Credential) -> bool:
    """Whether a caller with a role or a credential may call a method.

    Args:
        method: Full name of the method. A method without a row is permitted to nobody.
        held: The role of a client, or the credential of another caller.
    """
    needed = METHODS.get(method)
    if needed is Credential.IDENTITY:
        return isinstance(held, Role) or held is Credential.WORKER
    if isinstance(needed, Role):
        return isinstance(held, Role) and held >= needed
    return held is needed
