"""The digests of an image's files: computed when it is published, verified before a restore. Blocks."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from leasehold.v1 import errors_pb2

from leasehold_worker.checkpoints.image_manifest import MANIFEST_FILE, ImageFile, Manifest
from leasehold_worker.errors import OperationError

READ_BYTES: Final = 1 << 22


def digest_files(
    folder: Path, progress: Callable[[int], None], check: Callable[[], None]
) -> tuple[ImageFile, ...]:
    """Digests every file of a folder, and writes it to disk.

    Args:
        folder: The folder, which holds files only.
        progress: Receives the number of finished bytes.
        check: Called repeatedly; its exception ends the call.

    Raises:
        OSError: The disk failed.
    """
    files = []
    done = 0
    for path in sorted(folder.iterdir()):
        digest = hashlib.sha256()
        size = 0
        for piece in _pieces(path):
            check()
            digest.update(piece)
            size += len(piece)
            progress(done + size)
        sync(path)
        done += size
        files.append(ImageFile(path.name, size, digest.hexdigest()))
    return tuple(files)


def verify_files(
    folder: Path, manifest: Manifest, progress: Callable[[int], None], check: Callable[[], None]
) -> None:
    """Verifies that a folder holds exactly the files of a manifest, byte for byte.

    Args:
        folder: The folder of an image.
        manifest: Its expected files.
        progress: Receives the number of finished bytes.
        check: Called repeatedly; its exception ends the call.

    Raises:
        OperationError: CHECKPOINT_CORRUPT.
        OSError: The disk failed.
    """
    expected = {file.name: file for file in manifest.files}
    found = {entry.name for entry in os.scandir(folder)} - {MANIFEST_FILE}
    for name in sorted(found ^ expected.keys()):
        how = "is missing" if name in expected else "is not part of the image"
        raise corrupt(manifest.image_id, f"file {name!r} {how}")
    for file in expected.values():  # all sizes are checked before the long read of contents
        _check_size(folder / file.name, manifest.image_id, file)
    done = 0
    for name, file in sorted(expected.items()):
        digest = hashlib.sha256()
        for piece in _pieces(folder / name):
            check()
            digest.update(piece)
            done += len(piece)
            progress(done)
        if digest.hexdigest() != file.sha256:
            raise corrupt(manifest.image_id, f"file {name!r} was modified")


def corrupt(image_id: str, how: str) -> OperationError:
    """The error for a damaged image."""
    return OperationError(
        errors_pb2.ERROR_REASON_CHECKPOINT_CORRUPT,
        f"image {image_id} is damaged ({how}) and is not restored: delete it, and restore another",
        {"checkpoint_id": image_id},
    )


def sync(path: Path) -> None:
    """Writes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_size(path: Path, image_id: str, file: ImageFile) -> None:
    if path.is_symlink() or not path.is_file():
        raise corrupt(image_id, f"{file.name!r} is not a file")
    size = path.stat().st_size
    if size != file.size_bytes:
        raise corrupt(image_id, f"file {file.name!r} has {size} bytes instead of {file.size_bytes}")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(READ_BYTES):
            yield piece
