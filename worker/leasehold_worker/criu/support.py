"""Whether CRIU can write and restore processes of this host, with the obstacles."""

import os
from collections.abc import Sequence
from functools import partial
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.checkpoints.image_store import ImageStore
from leasehold_worker.checkpoints.volume_calls import call_volume
from leasehold_worker.criu.compatibility import ImageHost
from leasehold_worker.criu.installation import CriuFacts
from leasehold_worker.criu.obstacles import obstacles
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.leasing.suspend_memory import MemoryNeed, SuspendMemory
from leasehold_worker.workloads.workload import Workload

PASSING_S: Final = 2.0
"""Time for an obstacle to pass, such as a closing connection."""

PASSING_INTERVAL_S: Final = 0.05


@final
class CriuSupport:
    """The CRIU of one host, as plans and image checkpoints see it.

    Args:
        criu: The working CRIU, or the reason why there is none.
        store: The images.
        host_memory: The ledger of reserved host memory.
        host: The facts of this host that an image must fit.
    """

    def __init__(
        self, criu: CriuFacts | str, store: ImageStore, host_memory: SuspendMemory, host: ImageHost
    ) -> None:
        self._criu = criu
        self._store = store
        self._host_memory = host_memory
        self._host = host

    @property
    def unavailable_reason(self) -> str:
        """Why this worker can't write images. Empty: it can."""
        return self._criu if isinstance(self._criu, str) else ""

    def require_criu(self) -> CriuFacts:
        """The working CRIU.

        Raises:
            OperationError: UNSUPPORTED_CAPABILITY: there is none.
        """
        if isinstance(self._criu, str):
            raise OperationError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                f"this worker can't write images of processes: {self._criu}",
                {"capability": "checkpoint_image"},
            )
        return self._criu

    def require_criu_for(self, workload: Workload) -> CriuFacts:
        """The working CRIU, for a workload whose user may have images.

        CRIU opens, makes and removes files as root, by the paths in the image. Another user can put a link
        there while the workload is on disk. A restored process then has any file of the host open.

        Raises:
            OperationError: UNSUPPORTED_CAPABILITY: there is none. UNSUPPORTED_STATE: the workload runs as
                another user than the worker.
        """
        criu = self.require_criu()
        if workload.account is not None:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
                f"workload {workload.name} runs as {workload.account.name}, and CRIU would open files as root"
                " where that user can put links: choose cuda_suspend, keep_running or stop",
            )
        return criu

    async def obstacles(self, processes: Sequence[ProcessIdentity], *, suspended: bool) -> list[str]:
        """The obstacles to an image of the processes, each with a remedy.

        Passing obstacles get time: a server closes a connection a moment after its answer.

        Raises:
            OperationError: TARGET_NOT_RUNNABLE: the processes can't be read.
        """
        if not processes:
            await trio.lowlevel.checkpoint()
            return []
        look = partial(obstacles, processes, suspended=suspended)
        deadline = trio.current_time() + PASSING_S
        while True:
            found = await read_process(processes[0].pid, look, is_long=True)
            if not found or trio.current_time() > deadline:
                return found
            await trio.sleep(PASSING_INTERVAL_S)

    async def check_kept(self, image_id: str) -> None:
        """Refuses an image that is gone or for another host. Its digests are not checked.

        Raises:
            OperationError: UNKNOWN_CHECKPOINT, CHECKPOINT_CORRUPT or CHECKPOINT_INCOMPATIBLE.
        """
        image = await call_volume(self._store.find, image_id)
        self._host.check(image.manifest, self.require_criu())

    def need(self, workload: Workload) -> MemoryNeed:
        """Host memory that a restore of a workload needs: all of its image, until the restore is complete."""
        return self._host_memory.need(image_memory(workload), parks=False)


def image_memory(workload: Workload) -> dict[int, int]:
    """Host memory that an image needs, as if for this process, whose control group exists already."""
    return {os.getpid(): workload.parked.disk_bytes if workload.parked else 0}
