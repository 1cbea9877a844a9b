"""The facts of this host and of a workload for the manifest of an image."""

import platform
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import final

from leasehold_worker.checkpoints.image_manifest import (
    HostFacts,
    ImageGpu,
    ImageProcess,
    ImageSubject,
    Manifest,
    check_compatible,
)
from leasehold_worker.criu.installation import CriuFacts
from leasehold_worker.driver.members import Member, bytes_by_gpu
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.processes import ProcessIdentity, boot_id
from leasehold_worker.workloads.workload import Workload


@final
class ImageHost:
    """This worker's host, as manifests describe it."""

    def __init__(self, worker_id: str, inventory: Inventory) -> None:
        self._worker_id = worker_id
        self._inventory = inventory

    def subject(
        self,
        workload: Workload,
        home: Sequence[str],
        members: Sequence[Member],
        processes: Iterable[ProcessIdentity],
        criu: CriuFacts,
    ) -> ImageSubject:
        """The facts of a suspended workload for its image."""
        parked_bytes = bytes_by_gpu(members)
        return ImageSubject(
            workload_id=workload.workload_id,
            workload_name=workload.name,
            root_pid=workload.root.pid,
            processes=tuple(map(_process, processes)),
            members=tuple(_process(member.identity) for member in members),
            gpus=tuple(
                ImageGpu(gpu_uuid, self._inventory.chips.get(gpu_uuid, ""), parked_bytes.get(gpu_uuid))
                for gpu_uuid in home
            ),
            host=self._facts(criu),
            owner=workload.owner,
        )

    def check(self, manifest: Manifest, criu: CriuFacts) -> None:
        """Refuses an image that can't be restored here.

        Raises:
            OperationError: CHECKPOINT_INCOMPATIBLE.
        """
        check_compatible(manifest, self._facts(criu), Counter(self._inventory.chips.values()))

    def _facts(self, criu: CriuFacts) -> HostFacts:
        return HostFacts(
            worker_id=self._worker_id,
            hostname=socket.gethostname(),
            boot_id=boot_id(),
            kernel_release=platform.release(),
            architecture=platform.machine(),
            criu_version=criu.version,
            driver_version=self._inventory.versions.driver_version or "",
        )


def _process(identity: ProcessIdentity) -> ImageProcess:
    return ImageProcess(identity.pid, identity.start_time_ticks)
