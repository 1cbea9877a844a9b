"""The start of a workload's program: its environment, its output and its control group."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import WorkloadSpec

from leasehold_worker.crash_points import crash_point
from leasehold_worker.errors import OperationError
from leasehold_worker.files.workload_files import WORKING_FOLDER, open_output
from leasehold_worker.host.cgroup_limits import ResourceLimits
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.host_reservations import HostReservation
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.programs.programs import LaunchError, launch
from leasehold_worker.workloads.workload import WORKLOAD_ID_VARIABLE


@final
class ProgramStart:
    """Starts the programs of one host's workloads.

    Args:
        limits: The control groups.
        inherited: Environment that programs inherit from the worker.
        socket_path: The worker's local socket.
    """

    def __init__(self, limits: ResourceLimits, inherited: Mapping[str, str], socket_path: Path) -> None:
        self._limits = limits
        self._inherited = inherited
        self._socket_path = socket_path.absolute()

    async def start(
        self,
        folder: Path,
        workload_id: str,
        name: str,
        spec: WorkloadSpec,
        lease: Lease | None,
        host: HostReservation,
        nursery: trio.Nursery,
        *,
        restores: bool,
    ) -> ProcessIdentity:
        """Starts a program behind its shim.

        Args:
            folder: Folder of its workload's files.
            workload_id: Its workload's id.
            name: The name of the workload.
            spec: The spec of the workload.
            lease: Its GPUs. None: it has none.
            host: Its host resources other than GPUs.
            nursery: Runs the task that waits for its shim.
            restores: Its application waits for a restore.

        Raises:
            OperationError: SPAWN_FAILED; nothing was started.
        """
        try:
            output = await trio.to_thread.run_sync(open_output, folder)
            try:
                root = await launch(
                    folder,
                    spec.arguments,
                    working_directory=spec.working_directory or folder / WORKING_FOLDER,
                    environment={
                        **self._inherited,
                        **spec.environment,
                        **self.variables(workload_id, name, lease, restores=restores),
                    },
                    output=output,
                    group=self._limits.create(
                        workload_id, host.request.cpu_millicores, host.request.memory_bytes
                    ),
                    nursery=nursery,
                )
            finally:
                os.close(output)
        except (OSError, LaunchError) as error:
            raise OperationError(
                errors_pb2.ERROR_REASON_SPAWN_FAILED,
                f"{spec.arguments[0]!r} could not be started: {error}; give a program that "
                "exists on the worker",
            ) from error
        crash_point("program-started")
        return root

    def variables(
        self, workload_id: str, name: str, lease: Lease | None, *, restores: bool = False
    ) -> dict[str, str]:
        """The variables that a workload's program gets in place of inherited ones.

        GPUs are named by UUID, and a workload without a GPU sees none. A variable tells the program to wait
        for a restore, since the worker may be absent then.
        """
        visible = ",".join(lease.gpu_uuids) if lease else "-1"
        return {
            "CUDA_VISIBLE_DEVICES": visible,
            "NVIDIA_VISIBLE_DEVICES": visible,
            "LEASEHOLD_LEASE_ID": lease.lease_id if lease else "",
            "LEASEHOLD_WORKLOAD": name,
            WORKLOAD_ID_VARIABLE: workload_id,
            "LEASEHOLD_SOCKET": str(self._socket_path),
            "LEASEHOLD_RESTORE": "1" if restores else "",
        }
