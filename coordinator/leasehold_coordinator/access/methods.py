"""The role that each method needs. A method without a row is refused."""

from typing import Final

from leasehold_coordinator.access.roles import Role

_ROLES: Final[dict[str, dict[str, Role]]] = {
    "leasehold.v1.FleetService": {
        "GetWorker": Role.VIEWER,
        "ListWorkers": Role.VIEWER,
        "GetGpu": Role.VIEWER,
        "ListGpus": Role.VIEWER,
        "WatchFleet": Role.VIEWER,
        "Cordon": Role.OPERATOR,
        "Uncordon": Role.OPERATOR,
        "ResetGpuHealth": Role.OPERATOR,
        "DeleteWorker": Role.ADMIN,
    },
    "leasehold.v1.WorkloadService": {
        "CreateWorkload": Role.USER,
        "GetWorkload": Role.VIEWER,
        "ListWorkloads": Role.VIEWER,
        "WatchWorkloads": Role.VIEWER,
        "UpdateWorkload": Role.USER,
        "DeleteWorkload": Role.USER,
        "SuspendWorkload": Role.USER,
        "SuspendWorker": Role.OPERATOR,
        "RestoreWorkload": Role.USER,
        "RemapWorkloads": Role.USER,
        "Plan": Role.USER,
        "CheckpointWorkload": Role.USER,
        "ListCheckpoints": Role.USER,
        "DeleteCheckpoints": Role.USER,
        "ReleaseHold": Role.USER,
        "StopWorkload": Role.USER,
        "AdoptProcess": Role.OPERATOR,
        "ReleaseWorkload": Role.USER,
        "ReadWorkloadOutput": Role.USER,
    },
    "leasehold.v1.CommandService": {
        "GetCommand": Role.VIEWER,
        "ListCommands": Role.VIEWER,
        "WatchCommand": Role.VIEWER,
        "WatchCommands": Role.VIEWER,
        "CancelCommand": Role.USER,
    },
    "leasehold.v1.EventService": {
        "ListEvents": Role.VIEWER,
        "WatchEvents": Role.VIEWER,
    },
    "leasehold.v1.AuditService": {
        "ListAuditEntries": Role.OPERATOR,
        "VerifyAudit": Role.OPERATOR,
    },
    "leasehold.v1.EnrolmentService": {
        "CreateJoinToken": Role.ADMIN,
        "ListJoinTokens": Role.ADMIN,
        "DeleteJoinToken": Role.ADMIN,
        "UnbindGpu": Role.ADMIN,
    },
    "leasehold.v1.RenewalService": {"RenewCertificate": Role.NONE},
    "leasehold.v1.CertificateService": {
        "ListCertificates": Role.ADMIN,
        "RevokeCertificate": Role.ADMIN,
        "ListBlocks": Role.ADMIN,
        "BlockIdentity": Role.ADMIN,
        "UnblockIdentity": Role.ADMIN,
        "ListAuthorities": Role.ADMIN,
        "RotateAuthority": Role.ADMIN,
        "RetireAuthority": Role.ADMIN,
    },
    "leasehold.v1.AccessService": {
        "Grant": Role.ADMIN,
        "Revoke": Role.ADMIN,
        "ListBindings": Role.ADMIN,
        "WhoAmI": Role.NONE,
    },
    "grpc.health.v1.Health": {
        "Check": Role.VIEWER,
        "List": Role.VIEWER,
        "Watch": Role.VIEWER,
    },
    "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Role.VIEWER},
}

METHODS: Final = {
    f"/{service}/{method}": role for service, methods in _ROLES.items() for method, role in methods.items()
}
"""The weakest role that may call a method, by the method's full name."""

_READING_VERBS: Final = ("Get", "List", "Watch")
_READING: Final = frozenset(
    {"Check", "Plan", "ReadWorkloadOutput", "VerifyAudit", "WhoAmI", "ServerReflectionInfo"}
)
"""Further methods that change nothing. A new method counts as one that changes something."""

CHANGES: Final = frozenset(
    method
    for method in METHODS
    if not (name := method.rpartition("/")[2]).startswith(_READING_VERBS) and name not in _READING
)
"""The methods that change something, by full name. Each change writes a row of the audit."""
