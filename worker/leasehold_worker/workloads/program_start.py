"""The start of a workload's program: its environment, its output and its control group."""

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import WorkloadSpec

from leasehold_worker.crash_points import crash_point
from leasehold_worker.errors import OperationError
from leasehold_worker.files.workload_files import OUTPUT_FILE, open_output
from leasehold_worker.host.accounts import Account
from leasehold_worker.host.cgroup_limits import ResourceLimits
from leasehold_worker.host.limit_files import login_limits
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.host_reservations import HostReservation
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.programs.environment import user_environment
from leasehold_worker.programs.error_text import error_text
from leasehold_worker.programs.programs import LaunchError, Started, forget_start, keep_start, launch
from leasehold_worker.programs.run_as import RunAs
from leasehold_worker.programs.secret_variables import SealError, SecretVariables
from leasehold_worker.threads import run_in_thread
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.workload import WORKLOAD_ID_VARIABLE, Workload


@final
class ProgramStart:
    """Starts the programs of one host's workloads, each in a session of its own.

    A program and its output, which goes to a file, outlive the worker.

    Args:
        workloads: The registry, with the folder of each workload.
        limits: The control groups.
        inherited: Environment that programs inherit from the worker.
        socket_path: The worker's local socket.
        run_as: The Unix users of the workloads' owners.
        user: Name of the worker's user.
        secrets: Reveals the secret variables of programs.
        nursery: Runs the tasks that wait for shims.
    """

    def __init__(
        self,
        workloads: Workloads,
        limits: ResourceLimits,
        inherited: Mapping[str, str],
        socket_path: Path,
        run_as: RunAs,
        user: str,
        secrets: SecretVariables,
        nursery: trio.Nursery,
    ) -> None:
        self.user = user
        """Name of the worker's user."""
        self.run_as = run_as
        """The Unix users of the workloads' owners."""
        self._secrets = secrets
        self._workloads = workloads
        self._limits = limits
        self._inherited = inherited
        self._socket_path = socket_path.absolute()
        self._nursery = nursery

    async def start(
        self,
        workload_id: str,
        name: str,
        spec: WorkloadSpec,
        lease: Lease | None,
        account: Account | None,
        warnings: list[str],
        *,
        restores: bool,
    ) -> ProcessIdentity:
        """Starts a program behind its shim.

        Args:
            workload_id: The id of its workload.
            name: The name of its workload.
            spec: The spec of its workload.
            lease: Its GPUs. None: it has none.
            account: The Unix user that it runs as. None: the worker's.
            warnings: Receives the limits of its user that the worker may not give.
            restores: Its application waits for a restore.

        Raises:
            OperationError: SPAWN_FAILED, or PERMISSION_OR_OS: the limits of its user are unknown. Nothing was
                started.
        """
        folder, wanted = self._workloads.folder(workload_id), spec.resources
        limits = await login_limits(account)
        try:
            working_folder = self._workloads.working_folder(workload_id, account)
            owner = (account.uid, account.gid) if account is not None else None
            output = await run_in_thread(open_output, folder, working_folder, owner)
            try:
                record = Started(name, lease.gpu_uuids if lease is not None else ())
                await run_in_thread(keep_start, folder, record)
                root = await launch(
                    folder,
                    spec.arguments,
                    working_directory=spec.working_directory or working_folder,
                    environment={
                        **user_environment(self._inherited, account),
                        **spec.environment,
                        **self._secrets.reveal(workload_id, spec),
                        **self.variables(workload_id, name, lease, restores=restores),
                    },
                    output=output,
                    group=self._limits.create(workload_id, wanted.cpu_millicores, wanted.memory_bytes),
                    limits=limits.encoded,
                    user=account.ids if account is not None else "",
                    nursery=self._nursery,
                )
            finally:
                os.close(output)
        except (OSError, LaunchError, SealError) as error:
            raise OperationError(
                errors_pb2.ERROR_REASON_SPAWN_FAILED,
                f"{spec.arguments[0]!r} could not be started: {error_text(error)}; give the path of a "
                "program on the worker or the name of one in its PATH, which the user may execute, and a "
                "working directory, if any, that exists there",
            ) from error
        crash_point("program-started")
        warnings += limits.differences
        return root

    def workload(
        self,
        workload_id: str,
        name: str,
        spec: WorkloadSpec,
        root: ProcessIdentity,
        lease: Lease | None,
        host: HostReservation | None,
        owner: str = "",
        account: Account | None = None,
    ) -> Workload:
        """The workload of a program that this worker has started, and that runs."""
        return Workload(
            workload_id,
            name,
            spec,
            root,
            self._workloads.folder(workload_id) / OUTPUT_FILE,
            datetime.now(UTC),
            lease,
            user=account.name if account is not None else self.user,
            uid=account.uid if account is not None else os.geteuid(),
            owner=owner,
            account=account,
            host=host,
        )

    async def start_again(
        self, workload: Workload, lease: Lease | None, warnings: list[str], *, restores: bool
    ) -> None:
        """Starts the program of a stopped workload, on the GPUs of a lease.

        Its output continues in the same file. No task monitors its end yet.

        Raises:
            OperationError: As :meth:`start`, or NOT_PERMITTED: the owner is no longer mapped to its Unix
                user. Nothing was started.
        """
        workload_id = workload.workload_id
        account = await self.run_as.account(workload.owner)
        if (account.uid if account is not None else os.geteuid()) != workload.uid:
            raise OperationError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                f"workload {workload.name} ran as {workload.user}, and the worker's run_as maps its owner to "
                "another Unix user now: run it anew, or change run_as",
            )
        await forget_start(self._workloads.folder(workload_id))
        root = await self.start(
            workload_id, workload.name, workload.spec, lease, account, warnings, restores=restores
        )
        self._workloads.begin_again(workload, root)
        workload.start_time = datetime.now(UTC)
        workload.ready_time = None
        workload.unready = ""
        workload.begun_s = time.monotonic()

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
