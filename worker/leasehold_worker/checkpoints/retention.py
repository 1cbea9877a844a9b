"""Retention of images: as many as the disk and the budget hold, the newest first. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from leasehold.v1 import errors_pb2

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.errors import OperationError


@dataclass(frozen=True, slots=True)
class StoredItem:
    """The facts of an image, or of another item in the budget, that retention needs.

    Attributes:
        image_id: Its id.
        workload_id: The workload.
        create_time: Time of its completion.
        size_bytes: Its disk usage.
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
    """Chooses images to delete for a new one: the oldest first, and as few as suffice.

    Args:
        spare: Unneeded images.
        need_bytes: Size of the new image.
        used_bytes: Existing and reserved bytes of all kinds.
        budget_bytes: Budget of all items. 0: no bound but the disk.
        free_disk_bytes: Free bytes of the disk. Negative: the reserve is in use.

    Returns:
        Ids to delete, in this order, before anything is written.

    Raises:
        OperationError: INSUFFICIENT_DISK, all unneeded images together do not suffice.
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
