"""Publication and verification of images, as long calls on the image directory."""

from collections.abc import Callable

import trio

from leasehold_worker.checkpoints.image_manifest import ImageSubject
from leasehold_worker.checkpoints.image_store import ImageStore, PartialImage, StoredImage
from leasehold_worker.checkpoints.volume_calls import LongCall, long_volume_call


async def publish(
    store: ImageStore,
    image: PartialImage,
    subject: ImageSubject,
    progress: Callable[[int], None] | None = None,
) -> StoredImage:
    """As :meth:`ImageStore.publish`, in a thread.

    It either returns the final image, even if cancelled at its end, or raises and the image is not final.
    """
    return await long_volume_call(
        lambda call: store.publish(image, subject, _teller(call, progress), call.check, call.commit)
    )


async def verify(
    store: ImageStore, image: StoredImage, progress: Callable[[int], None] | None = None
) -> None:
    """Like :meth:`ImageStore.verify`, in a thread. A cancellation takes effect at once."""
    await long_volume_call(lambda call: store.verify(image, _teller(call, progress), call.check))


def _teller(call: LongCall, progress: Callable[[int], None] | None) -> Callable[[int], None]:
    """The progress callback of a thread."""
    if progress is None:
        return lambda _: None

    def tell(done_bytes: int) -> None:
        if not call.is_given_up:
            progress(done_bytes)

    return lambda done_bytes: trio.from_thread.run_sync(tell, done_bytes)
