"""Which images are kept: as many as the disk and its budget hold, the newest first. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.sizes import size_text


@dataclass(frozen=True, slots=True)
class KeptImage:
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
    kept: Collection[KeptImage],
    in_use: Collection[str],
    *,
    need_bytes: int,
    budget_bytes: int,
    free_disk_bytes: int,
) -> list[str]:
    """Chooses what to delete so that an image fits: the oldest first, and as few as serve.

    Args:
        kept: All that is there.
        in_use: Ids of what a parked workload needs, or an operation reads.
        need_bytes: What the new image may take.
        budget_bytes: What all may take together. 0: no bound but the disk.
        free_disk_bytes: What may still be written to the disk.

    Returns:
        Ids to delete, in this order, before the image is begun.

    Raises:
        OperationError: INSUFFICIENT_DISK, all that is not in use would not make room enough.
    """
    used = sum(image.size_bytes for image in kept)
    over_budget = used + need_bytes - budget_bytes if budget_bytes else 0
    missing = max(over_budget, need_bytes - free_disk_bytes)
    chosen: list[str] = []
    for image in sorted(kept, key=_age):
        if missing <= 0:
            return chosen
        if image.image_id not in in_use:
            chosen.append(image.image_id)
            missing -= image.size_bytes
    if missing <= 0:
        return chosen
    rule = (
        f"only {size_text(free_disk_bytes)} are free on the disk"
        if need_bytes - free_disk_bytes >= over_budget
        else f"{size_text(used)} of the budget of {size_text(budget_bytes)} are taken"
    )
    raise OperationError(
        errors_pb2.ERROR_REASON_INSUFFICIENT_DISK,
        f"an image of up to {size_text(need_bytes)} is to be kept, but {rule}, and images that no workload "
        f"needs take {size_text(used - _bytes_of(kept, in_use))}: make room on the disk, raise the budget, "
        "or park the workload in host memory",
        {"need_bytes": str(need_bytes), "missing_bytes": str(missing)},
    )


def expired(
    kept: Collection[KeptImage],
    in_use: Collection[str],
    *,
    now: datetime,
    keep_for: timedelta | None,
    keep_count: int | None,
) -> list[str]:
    """Chooses what is deleted by policy, whether or not there is room.

    Args:
        kept: All that is there.
        in_use: Ids of what is needed; it stays, and counts.
        now: The time.
        keep_for: How long an image is kept. None: for ever.
        keep_count: How many are kept of each workload, the newest. None: all.

    Returns:
        Ids to delete, the oldest first.
    """
    chosen = []
    newer: dict[str, int] = {}
    for image in sorted(kept, key=_age, reverse=True):
        rank = newer.get(image.workload_id, 0)
        newer[image.workload_id] = rank + 1
        too_old = keep_for is not None and now - image.create_time > keep_for
        too_many = keep_count is not None and rank >= keep_count
        if (too_old or too_many) and image.image_id not in in_use:
            chosen.append(image.image_id)
    return chosen[::-1]


def _age(image: KeptImage) -> tuple[datetime, str]:
    return image.create_time, image.image_id


def _bytes_of(kept: Collection[KeptImage], ids: Collection[str]) -> int:
    return sum(image.size_bytes for image in kept if image.image_id in ids)
