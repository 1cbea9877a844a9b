"""The archive: a gzipped tar file that only its creator may read."""

import gzip
import io
import os
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from leasehold_client import __version__
from leasehold_client.support.members import Bundle, Member, document


def with_manifest(bundle: Bundle) -> list[Member]:
    """The members with the manifest, which lists all others and has the notes."""
    manifest = {
        "leasehold": __version__,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "members": {member.name: member.what for member in bundle.members},
        "notes": bundle.notes,
    }
    what = "this list, and why parts are missing"
    return [Member("manifest.json", what, document(manifest)), *bundle.members]


def write_archive(path: Path, members: Sequence[Member]) -> int:
    """Writes a new archive with mode 0600. A write that fails or is interrupted leaves no file.

    Returns:
        Its size in bytes.

    Raises:
        FileExistsError: The path exists.
        OSError: The archive can't be written.
    """
    packed = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w") as tar,
    ):
        for member in members:
            entry = tarfile.TarInfo(f"leasehold-support/{member.name}")
            entry.size, entry.mode, entry.mtime = len(member.content), 0o600, int(time.time())
            tar.addfile(entry, io.BytesIO(member.content))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(packed.getbuffer())
            file.flush()
            os.fsync(descriptor)
    except BaseException:  # such as KeyboardInterrupt
        path.unlink(missing_ok=True)
        raise
    return packed.getbuffer().nbytes
