"""What takes long with images, out of the way of everything else: making one final, and verifying one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from leasehold_worker.images.manifest import ImageSubject
from leasehold_worker.images.store import ImageStore, PartialImage, StoredImage


async def publish(
    store: ImageStore,
    image: PartialImage,
    subject: ImageSubject,
    progress: Callable[[int], None] | None = None,
) -> StoredImage:
    """As :meth:`ImageStore.publish`, in a thread.

    Either returns the final image, also when it is cancelled at its end, or raises and it is not final.
    """
    return await trio.to_thread.run_sync(partial(store.publish, image, subject, **_hooks(progress)))


async def verify(
    store: ImageStore, image: StoredImage, progress: Callable[[int], None] | None = None
) -> None:
    """As :meth:`ImageStore.verify`, in a thread. A cancellation is noticed at the next piece."""
    await trio.to_thread.run_sync(partial(store.verify, image, **_hooks(progress)))


def _hooks(progress: Callable[[int], None] | None) -> dict[str, Any]:
    hooks: dict[str, Any] = {"check": trio.from_thread.check_cancelled}
    if progress is not None:

        def tell(done_bytes: int) -> None:
            trio.from_thread.run_sync(progress, done_bytes)

        hooks["progress"] = tell
    return hooks
