"""The archive of a backup: a manifest, then the files that it lists.

The archive is a tar file, compressed by gzip. Its first member is ``manifest.json``, which lists each file
with its size and SHA-256.
"""

import gzip
import hashlib
import os
import stat
import tarfile
import zlib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, Final

import msgspec

from leasehold_coordinator.errors import StartError

MANIFEST: Final = "manifest.json"
MANIFEST_LIMIT_BYTES: Final = 1_000_000
FORMAT: Final = 1
BLOCK_BYTES: Final = 1 << 20


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a backup."""

    size_bytes: int
    sha256: str
    mode: int


class Manifest(msgspec.Struct, frozen=True):
    """The contents of a backup.

    Attributes:
        format: Version of this layout.
        release: The release of Leasehold that made the backup.
        made_at: When, as ISO 8601 in UTC.
        last_commit: Number of the store's last commit. None: the store is not
            included, because it is on a database server.
        migration: The migration that made the store's tables. Empty: the store is not included.
        files: The files by name, relative to the state directory.
    """

    format: int
    release: str
    made_at: str
    last_commit: int | None
    migration: str
    files: dict[str, FileEntry]


def describe(path: Path, mode: int) -> FileEntry:
    """The entry of a file.

    Raises:
        OSError: The file can't be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(os.fstat(file.fileno()).st_size, digest, mode)


def write_archive(archive: IO[bytes], manifest: Manifest, sources: Mapping[str, Path]) -> None:
    """Writes an archive.

    Args:
        archive: The file to write.
        manifest: The manifest.
        sources: Where the content of each listed file is.

    Raises:
        OSError: A file can't be read or written, or has changed since it was listed.
    """
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=1, format=tarfile.PAX_FORMAT) as tar:
        content = msgspec.json.format(msgspec.json.encode(manifest))
        tar.addfile(_member(MANIFEST, len(content), 0o600), BytesIO(content))
        for name, entry in manifest.files.items():
            with sources[name].open("rb") as file:
                tar.addfile(_member(name, entry.size_bytes, entry.mode), file)


def _member(name: str, size_bytes: int, mode: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size_bytes, mode
    return member


def unpack(archive: Path, folder: Path) -> Manifest:
    """Unpacks an archive into a folder, and verifies each file.

    Args:
        archive: The archive.
        folder: An empty directory.

    Raises:
        StartError: The archive is damaged, not a regular file, or no backup.
        OSError: A file can't be read or written.
    """
    try:
        with (
            _open_regular(archive) as file,
            gzip.open(file) as whole,
            tarfile.open(fileobj=whole, mode="r:") as tar,
        ):
            manifest = _read_manifest(tar)
            missing = dict(manifest.files)
            while (member := tar.next()) is not None:
                entry = missing.pop(member.name, None)
                content = tar.extractfile(member) if member.isreg() else None
                if entry is None or content is None or member.size != entry.size_bytes:
                    raise _damaged(
                        archive, f"it has {member.name[:100]!r}, which its manifest does not list so"
                    )
                _unpack_file(archive, content, folder / member.name, entry)
            while whole.read(BLOCK_BYTES):  # the checksum is at the end
                pass
    except gzip.BadGzipFile as error:
        is_no_gzip = str(error).startswith("Not a gzipped file")
        why = "it is no archive of `leasehold backup create`" if is_no_gzip else str(error)
        raise _damaged(archive, why) from error
    except EOFError as error:
        raise _damaged(archive, "its end is missing") from error
    except (tarfile.TarError, zlib.error, msgspec.MsgspecError) as error:
        raise _damaged(archive, str(error)) from error
    if missing:
        raise _damaged(archive, f"{min(missing)!r} is missing")
    return manifest


def _open_regular(archive: Path) -> BinaryIO:
    """Opens an archive. The open of a pipe would wait for a writer."""
    file = open(archive, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise _damaged(archive, "it is not a regular file")
    return file


def _read_manifest(tar: tarfile.TarFile) -> Manifest:
    member = tar.next()
    content = tar.extractfile(member) if member is not None and member.name == MANIFEST else None
    if member is None or content is None or member.size > MANIFEST_LIMIT_BYTES:
        raise tarfile.ReadError(f"it does not begin with {MANIFEST}, so it is not a backup of a coordinator")
    manifest = msgspec.json.decode(content.read(), type=Manifest)
    if manifest.format != FORMAT:
        raise tarfile.ReadError(f"it has the format {manifest.format}, and this release reads {FORMAT}")
    for name in manifest.files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or not 1 <= len(path.parts) <= 2:
            raise tarfile.ReadError(f"{name[:100]!r} is not a name of a file in a state directory")
    return manifest


def _unpack_file(archive: Path, content: IO[bytes], path: Path, entry: FileEntry) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, entry.mode & 0o644)
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(descriptor)
    if digest.hexdigest() != entry.sha256:
        raise _damaged(archive, f"{path.name} has another content than its manifest says")


def _damaged(archive: Path, why: str) -> StartError:
    return StartError(f"the backup {archive} can't be used: {why}; take another backup")
