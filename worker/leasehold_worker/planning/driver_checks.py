"""Conditions of the host and of processes that driver calls depend on. Checks change nothing."""

import platform
import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.driver.errors import DriverError
from leasehold_worker.driver.helper_pool import Driver, DriverCallUnansweredError, DriverUnavailableError
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.members import Member, unanswered, unavailable
from leasehold_worker.driver.process import CheckpointProcess
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.host.processes import (
    ProcessIdentity,
    missing_device_nodes,
    why_blocked,
    will_end,
)
from leasehold_worker.host.shared_libraries import LoadedLibrary, loaded_library
from leasehold_worker.overlap import both
from leasehold_worker.planning.findings import Findings

SUSPEND_CUDA_VERSION: Final = 12080
"""The driver API for checkpoints came with CUDA 12.8 (driver 570)."""

REMAP_CUDA_VERSION: Final = 13000
"""GPU pairs came with CUDA 13.0 (driver 580)."""

PROVEN_ARCHITECTURE: Final = "x86_64"
"""On 64-bit Arm, checkpoint answered NOT_SUPPORTED (driver 580.142, NVIDIA/cuda-checkpoint issue 51)."""

_VERSION: Final = re.compile(r"\.so\.(\d+\.\d+(?:\.\d+)?)$")


def why_unsupported(driver: Driver, cuda_version: int) -> str | None:
    """The missing driver feature of a CUDA version, with the remedy. None: it is available."""
    if driver.unavailable_reason is not None:
        return (
            f"there is no usable CUDA driver ({driver.unavailable_reason}): `leasehold doctor` on its host "
            "names the remedy, and the worker tries again by itself"
        )
    if (driver.cuda_version or 0) < cuda_version:
        supported, needed = version_text(driver.cuda_version), version_text(cuda_version)
        return f"the driver supports CUDA {supported}, and {needed} is needed: update the driver"
    return None


def version_text(cuda_version: int | None) -> str:
    """A CUDA version such as "12.8"."""
    return "nothing" if cuda_version is None else f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"


def library_version(path: str) -> str | None:
    """The driver's version in the name of its libcuda. None: the name has none."""
    match = _VERSION.search(path)
    return match[1] if match else None


def why_other_library(target: LoadedLibrary | None, ours: LoadedLibrary | None) -> str | None:
    """The difference between the libcuda of a process and that of the driver helper. None: none is known.

    With different libraries, driver calls were seen to hang.
    """
    if target is None or ours is None or target.file_id == ours.file_id:
        return None
    version = library_version(target.path)
    if version is not None and version == library_version(ours.path):
        return None
    return f"{target.path}, and the worker {ours.path}"


@final
class DriverChecks:
    """Checks of one host's driver and processes."""

    def __init__(self, driver: Driver, inventory: Inventory) -> None:
        self._driver = driver
        self._inventory = inventory

    def driver(self, findings: Findings, cuda_version: int) -> None:
        """Checks the driver, its version, and the architecture."""
        reason = why_unsupported(self._driver, cuda_version)
        with findings.check("driver", f"supports CUDA {version_text(self._driver.cuda_version)}"):
            if reason is not None:
                raise OperationError(errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER, reason)
        if platform.machine() != PROVEN_ARCHITECTURE:
            findings.warn(
                "architecture",
                f"checkpoints are verified only on {PROVEN_ARCHITECTURE}, and this host is "
                f"{platform.machine()}: calls that the driver refuses are rolled back",
            )

    async def mig(self, findings: Findings, gpu_uuids: Iterable[str]) -> None:
        """Checks that MIG is off, which no driver checkpoints (NVIDIA/cuda-checkpoint issue 42)."""
        enabled = await trio.to_thread.run_sync(self._inventory.mig_enabled)
        asked = list(gpu_uuids)
        with findings.check("mig", f"off on {', '.join(asked)}" if asked else "off: no GPU is affected"):
            for gpu_uuid in asked:
                if gpu_uuid in enabled:
                    raise OperationError(
                        errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
                        f"MIG is on for {gpu_uuid}, and the driver can't checkpoint on it: "
                        "turn it off with nvidia-smi -mig 0",
                        {"gpu_uuid": gpu_uuid},
                    )

    async def present(self, findings: Findings, gpu_uuids: Iterable[str]) -> None:
        """Checks that no GPU has fallen off the bus: its memory can't be copied, and NVML reports nothing."""
        lost = await trio.to_thread.run_sync(self._inventory.lost)
        with findings.check("present", "on the bus"):
            for gpu_uuid in gpu_uuids:
                if gpu_uuid in lost:
                    raise OperationError(
                        errors_pb2.ERROR_REASON_GPU_UNHEALTHY,
                        f"NVML reports {gpu_uuid} as lost, so that nothing can be copied from "
                        "it: stop the workload, restart the host, and check the GPU's seat",
                        {"gpu_uuid": gpu_uuid},
                    )

    async def runnable(self, findings: Findings, processes: Iterable[ProcessIdentity]) -> bool:
        """Checks that no process would block driver calls forever. False: one would, so make no call."""
        found = list(processes)
        refusals = len(findings.refusals)
        with findings.check("runnable", f"{len(found)} checked: none stopped, traced or frozen"):
            for identity, reason in await blocked_among(found):
                raise OperationError(
                    errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE,
                    f"process {identity.pid} is {reason}: resume it first",
                    {"pid": str(identity.pid)},
                )
        return len(findings.refusals) == refusals

    async def members(self, findings: Findings, members: Sequence[Member]) -> None:
        """Checks that each member is traceable, uses the worker's libcuda, and is no client of MPS."""
        shared, refusals = await both(
            partial(trio.to_thread.run_sync, self._inventory.mps_pids),
            partial(self._refusals, [member.identity for member in members]),
        )
        with findings.check("mps", "not used"):
            for member in members:
                if member.identity.pid in shared:
                    raise OperationError(
                        errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
                        f"process {member.identity.pid} uses its GPU through MPS, which the driver can't "
                        "checkpoint: run it without CUDA_MPS_PIPE_DIRECTORY",
                        {"pid": str(member.identity.pid)},
                    )
        with findings.check("libcuda", "that of the worker"):
            for of_library, _ in refusals:
                if of_library is not None:
                    raise of_library
        with findings.check("trace_permission", "granted"):
            for _, of_trace in refusals:
                if of_trace is not None:
                    raise of_trace

    async def _refusals(
        self, processes: Sequence[ProcessIdentity]
    ) -> list[tuple[OperationError | None, OperationError | None]]:
        """For each process, the difference of its libcuda, and why the worker may not control it."""
        found: dict[ProcessIdentity, tuple[OperationError | None, OperationError | None]] = {}

        async def look(identity: ProcessIdentity) -> None:
            found[identity] = await both(
                partial(self._why_other_library, identity), partial(self._why_untraceable, identity)
            )

        async with trio.open_nursery() as nursery:
            for identity in processes:
                nursery.start_soon(look, identity)
        return [found[identity] for identity in processes]

    async def _why_other_library(self, identity: ProcessIdentity) -> OperationError | None:
        try:
            loaded = await read_process(identity.pid, partial(loaded_library, identity.pid, "libcuda.so"))
        except OperationError as error:
            return error
        if other := why_other_library(loaded, self._driver.libcuda):
            return OperationError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER,
                f"process {identity.pid} uses the user-mode driver {other}, so that driver calls may hang: "
                "start it without cuda-compat, or the worker with it",
                {"pid": str(identity.pid)},
            )
        return None

    async def _why_untraceable(self, identity: ProcessIdentity) -> OperationError | None:
        pid = identity.pid
        try:
            obstacle = await CheckpointProcess(self._driver, pid, identity.start_time_ticks).trace_obstacle()
        except DriverCallUnansweredError as error:
            return unanswered(error, pid, DriverCall.TRACE_PERMISSION)
        except DriverUnavailableError as error:
            return unavailable(error)
        except DriverError as error:
            return error.to_operation_error(observed_state="unknown", alive=True)
        return None if obstacle is None else await _untraceable(identity, obstacle)

    async def device_nodes(
        self, findings: Findings, members: Sequence[Member], gpu_uuids: Sequence[str]
    ) -> None:
        """Checks that members in containers have the device nodes of their new GPUs."""
        minors = self._inventory.minors
        nodes = {f"/dev/nvidia{minors[uuid]}": uuid for uuid in gpu_uuids if uuid in minors}
        with findings.check("device_nodes", "present for the members"):
            for member in members:
                missing = partial(missing_device_nodes, member.identity, nodes)
                for node in await read_process(member.identity.pid, missing):
                    raise OperationError(
                        errors_pb2.ERROR_REASON_DEVICE_NODE_MISSING,
                        f"process {member.identity.pid} has no {node} in its container: give the container "
                        "all GPUs of the host, or choose a GPU that it has",
                        {"pid": str(member.identity.pid), "gpu_uuid": nodes[node]},
                    )


async def blocked_among(processes: Sequence[ProcessIdentity]) -> list[tuple[ProcessIdentity, str]]:
    """The processes that can't answer the driver, each with the reason.

    Raises:
        OperationError: TARGET_NOT_RUNNABLE: they can't be read.
    """

    def look() -> list[tuple[ProcessIdentity, str]]:
        return [(identity, reason) for identity in processes if (reason := why_blocked(identity))]

    return await read_process(processes[0].pid, look) if processes else []


async def _untraceable(identity: ProcessIdentity, obstacle: str) -> OperationError:
    """Why a process can't be controlled: it is ending, or the worker lacks permission.

    Args:
        identity: The process.
        obstacle: The missing permission, with the remedy.
    """
    pid = identity.pid
    metadata = {"pid": str(pid)}
    if await will_end(identity):
        return OperationError(errors_pb2.ERROR_REASON_TARGET_CRASHED, f"process {pid} has ended", metadata)
    return OperationError(
        errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
        f"the worker may not control process {pid}, as {obstacle}",
        metadata,
    )
