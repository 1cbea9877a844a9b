"""Which images are kept: as many as the disk and its budget hold, the newest first. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from leasehold.v1 import errors_pb2

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.errors import OperationError


@dataclass(frozen=True, slots=True)
class StoredItem:
    """What deciding needs of an image, or of whatever else shares the budget with images.

    Attributes:
        image_id: Its id.
        workload_id: Whose it is.
        create_time: When it was finished.
        size_bytes: Disk that it takes.
    """

    image_id: str
    workload_id: str
    create_time: datetime
    size_bytes: int


def make_room(
    spare: Collection[StoredItem],
    *,
    need_bytes: int,
    used_bytes: int,
    budget_bytes: int,
    free_disk_bytes: int,
) -> list[str]:
    """Chooses what to delete so that something fits: the oldest first, and as few as serve.

    Args:
        spare: Images that nobody needs.
        need_bytes: What is to be added.
        used_bytes: What is there, and what is being written, of all kinds.
        budget_bytes: What all may take together. 0: no bound but the disk.
        free_disk_bytes: What may still be written to the disk. Below 0: too much is already.

    Returns:
        Ids to delete, in this order, before anything is written.

    Raises:
        OperationError: INSUFFICIENT_DISK, all that is not needed would not make room enough.
    """
    over_budget = used_bytes + need_bytes - budget_bytes if budget_bytes else 0
    missing = max(over_budget, need_bytes - free_disk_bytes)
    chosen: list[str] = []
    for image in sorted(spare, key=_age):
        if missing <= 0:
            return chosen
        chosen.append(image.image_id)
        missing -= image.size_bytes
    if missing <= 0:
        return chosen
    rule = (
        f"only {size_text(max(0, free_disk_bytes))} are free on the disk"
        if need_bytes - free_disk_bytes >= over_budget
        else f"{size_text(used_bytes)} of the budget of {size_text(budget_bytes)} are used"
    )
    raise OperationError(
        errors_pb2.ERROR_REASON_INSUFFICIENT_DISK,
        f"checkpoints need up to {size_text(need_bytes)} more, but {rule}, and images that no "
        f"workload needs take {size_text(sum(image.size_bytes for image in spare))}: free "
        "space on the disk, raise the budget, or suspend the workload in host memory",
        {"need_bytes": str(need_bytes), "missing_bytes": str(missing)},
    )


def _age(image: StoredItem) -> tuple[datetime, str]:
    return image.create_time, image.image_id
