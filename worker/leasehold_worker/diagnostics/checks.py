"""Every check of ``leasehold doctor``, in the order in which it prints them."""

from collections.abc import Mapping
from typing import Final

from leasehold_worker.diagnostics import gpu_checks as gpu
from leasehold_worker.diagnostics import host_checks as host
from leasehold_worker.diagnostics import service_checks as service
from leasehold_worker.diagnostics import user_checks as users
from leasehold_worker.diagnostics.examination import Look

CHECKS: Final[Mapping[str, Look]] = {
    "kernel": host.kernel,
    "proc": host.proc,
    "architecture": host.architecture,
    "libcuda": gpu.libcuda,
    "driver": gpu.driver,
    "driver_remap": gpu.driver_remap,
    "bindings": gpu.bindings,
    "nvml": gpu.nvml,
    "driver_match": gpu.driver_match,
    "gpus": gpu.gpus,
    "mig": gpu.mig,
    "mps": gpu.mps,
    "persistence_mode": gpu.persistence_mode,
    "device_nodes": gpu.device_nodes,
    "trace_permission": host.trace_permission,
    "host_memory": host.host_memory,
    "cgroup_memory": host.cgroup_memory,
    "swap": host.swap,
    "huge_pages": host.huge_pages,
    "criu": host.criu,
    "run_as": users.run_as,
    "user_limits": users.user_limits,
    "configuration": host.configuration,
    "state_directory": host.state_directory,
    "coordinator": host.coordinator,
}
"""The checks by their name on the screen and in JSON. Checks that plans have too share the name."""

SERVICE_CHECKS: Final[Mapping[str, Look]] = {
    "unit": service.unit,
    "user": service.user,
    "capabilities": service.capabilities,
    "socket": service.local_socket,
    "certificate": service.certificate,
    "disk": service.disk,
    "clock": service.clock,
    "cgroup_delegation": service.cgroup_delegation,
    "core_dumps": service.core_dumps,
}
"""The further checks of ``--host``."""
