"""Publication and verification of images, in threads, since both take long."""

from collections.abc import Callable

import trio

from leasehold_worker.checkpoints.image_manifest import ImageSubject
from leasehold_worker.checkpoints.image_store import ImageStore, PartialImage, StoredImage


async def publish(
    store: ImageStore,
    image: PartialImage,
    subject: ImageSubject,
    progress: Callable[[int], None] | None = None,
) -> StoredImage:
    """As :meth:`ImageStore.publish`, in a thread.

    It either returns the final image, even if cancelled at its end, or raises and the image is not final.
    """
    check = trio.from_thread.check_cancelled
    return await trio.to_thread.run_sync(store.publish, image, subject, _teller(progress), check)


async def verify(
    store: ImageStore, image: StoredImage, progress: Callable[[int], None] | None = None
) -> None:
    """Like :meth:`ImageStore.verify`, in a thread. A cancellation takes effect at the next piece."""
    check = trio.from_thread.check_cancelled
    await trio.to_thread.run_sync(store.verify, image, _teller(progress), check)


def _teller(progress: Callable[[int], None] | None) -> Callable[[int], None]:
    """The progress callback of a thread."""
    if progress is None:
        return lambda _: None

    def tell(done_bytes: int) -> None:
        trio.from_thread.run_sync(progress, done_bytes)

    return tell
