"""The manifest of an image: its files, its subject, and the hosts that can restore it.

The file has the manifest and a digest of its bytes, so that a damaged one is detected. It also has a MAC of
its worker, so that nobody else makes or changes an image that this worker restores.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Final

import msgspec
from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.files.regular_files import is_tellable
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity

FILES_LIMIT: Final = 100_000
"""Files of an image: CRIU writes some for each process."""

MANIFEST_LIMIT_BYTES: Final = 32 * 2**20
"""Size limit of a manifest, which suffices for a hundred thousand files."""

MANIFEST_FILE: Final = "manifest.json"
FORMAT: Final = 2


Text = Annotated[str, msgspec.Meta(max_length=1024)]
"""A text of bounded length: a report with it must fit into a frame, even from a foreign manifest."""


class ImageFile(msgspec.Struct, frozen=True):
    """A file of an image.

    Attributes:
        name: Its name, without a folder.
        size_bytes: Its size.
        sha256: Digest of its content, in hexadecimal digits.
    """

    name: Text
    size_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    sha256: Text


class ImageProcess(msgspec.Struct, frozen=True):
    """A process when the image was written; restored, it has the same pid and another start time."""

    pid: Annotated[int, msgspec.Meta(ge=1, le=2**22)]
    start_time_ticks: Annotated[int, msgspec.Meta(ge=0, le=2**62)]

    @property
    def identity(self) -> ProcessIdentity:
        """Identity of the process when the image was written."""
        return ProcessIdentity(Pid(self.pid), self.start_time_ticks)


class ImageGpu(msgspec.Struct, frozen=True):
    """A GPU that the workload held.

    Attributes:
        uuid: Its UUID.
        model: Its product name in NVML.
        device_memory_bytes: Device memory of the workload on it. None: unknown to NVML.
    """

    uuid: Text
    model: Text
    device_memory_bytes: Annotated[int, msgspec.Meta(ge=0, le=2**53)] | None


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a host that a restore depends on.

    Attributes:
        worker_id: The worker.
        hostname: Name of its host.
        boot_id: The boot of the kernel.
        kernel_release: Kernel release, as of uname.
        architecture: Machine, as of uname: x86_64.
        criu_version: Version of CRIU, such as 4.2.1.
        driver_version: Version of the GPU driver, such as 580.95.05. Empty: there is none.
    """

    worker_id: Text
    hostname: Text
    boot_id: Text
    kernel_release: Text
    architecture: Text
    criu_version: Text
    driver_version: Text


class ImageSubject(msgspec.Struct, frozen=True, kw_only=True):
    """The subject of an image.

    Attributes:
        workload_id: The workload.
        workload_name: Its name.
        root_pid: Its first process.
        processes: All its processes.
        members: The processes that use CUDA.
        gpus: Its GPUs, in the workload's order.
        host: Its host.
        owner: The owner of the workload. Empty: unknown.
    """

    workload_id: Text
    workload_name: Text
    root_pid: int
    processes: tuple[ImageProcess, ...]
    members: tuple[ImageProcess, ...]
    gpus: tuple[ImageGpu, ...]
    host: HostFacts
    owner: Text = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """All facts of an image.

    Attributes:
        image_id: Its id.
        create_time: Time of its completion, with the time zone.
        files: Its files without the manifest, by name.
        subject: Its subject.
        kind: The program that wrote it.
    """

    image_id: Text
    create_time: Annotated[datetime, msgspec.Meta(tz=True)]
    files: Annotated[tuple[ImageFile, ...], msgspec.Meta(max_length=FILES_LIMIT)]
    subject: ImageSubject
    kind: Text = "criu"

    @property
    def size_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids that a restore of the image needs."""
        return tuple(process.pid for process in self.subject.processes)


class UnknownFormatError(ValueError):
    """A manifest of another release; the text is part of a sentence."""


class _Format(msgspec.Struct):
    format: int


class _File(msgspec.Struct):
    """The file: version of its format, digest of the manifest's bytes, the bytes, and their HMAC-SHA256."""

    format: int
    sha256: str
    manifest: msgspec.Raw
    mac: str = ""


def encode_manifest(manifest: Manifest, key: bytes = b"") -> bytes:
    """The manifest as the text of its file, with a MAC unless the key is empty."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    mac = hmac.digest(key, text, "sha256").hex() if key else ""
    file = _File(FORMAT, hashlib.sha256(text).hexdigest(), msgspec.Raw(text), mac)
    return msgspec.json.encode(file) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """The manifest in its file.

    Raises:
        UnknownFormatError: The manifest is of another release.
        ValueError: The manifest is damaged; the text is part of a sentence.
    """
    try:
        found = msgspec.json.decode(data, type=_Format).format
        if found != FORMAT:
            raise UnknownFormatError(f"its manifest has format {found}, and this version reads {FORMAT}")
        file = msgspec.json.decode(data, type=_File)
        if hashlib.sha256(file.manifest).hexdigest() != file.sha256:
            raise ValueError("its manifest was modified")
        manifest = msgspec.json.decode(file.manifest, type=Manifest)
        if not is_tellable(manifest.create_time):
            raise ValueError("its manifest has an invalid time")
        return manifest
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"its manifest is damaged ({error})") from error


def has_mac(data: bytes, key: bytes) -> bool:
    """Whether the text of a manifest's file has the MAC of a key.

    Raises:
        msgspec.MsgspecError: The text is no manifest's file.
    """
    file = msgspec.json.decode(data, type=_File)
    return hmac.compare_digest(hmac.digest(key, bytes(file.manifest), "sha256").hex(), file.mac)


@dataclass(frozen=True, slots=True)
class _Rule:
    value: str
    rule: str
    remedy: str


def check_compatible(manifest: Manifest, here: HostFacts, models: Mapping[str, int]) -> None:
    """Refuses an image whose manifest shows that this host can't restore it.

    Args:
        manifest: Manifest of the image.
        here: The host.
        models: Number of the host's GPUs by model.

    Raises:
        OperationError: CHECKPOINT_INCOMPATIBLE, with the first broken rule.
    """
    broken = _broken_rule(manifest, here, models)
    if broken is not None:
        raise OperationError(
            errors_pb2.ERROR_REASON_CHECKPOINT_INCOMPATIBLE,
            f"image {manifest.image_id} {broken.value}, and {broken.rule}: {broken.remedy}",
            {"checkpoint_id": manifest.image_id},
        )


def _broken_rule(manifest: Manifest, here: HostFacts, models: Mapping[str, int]) -> _Rule | None:
    subject, there = manifest.subject, manifest.subject.host
    if there.architecture != here.architecture:
        return _Rule(
            f"is of architecture {there.architecture}",
            f"this host is {here.architecture}",
            f"restore it on a host like {there.hostname}",
        )
    if there.worker_id != here.worker_id:
        return _Rule(
            f"was written on {there.hostname}",
            "the files that its processes have open are there",
            f"restore it on {there.hostname}",
        )
    if there.kernel_release != here.kernel_release:
        return _Rule(
            f"is of kernel {there.kernel_release}",
            f"this host runs {here.kernel_release}",
            f"start the host with kernel {there.kernel_release}, or run the workload again",
        )
    if _numbers(there.criu_version) > _numbers(here.criu_version):
        return _Rule(
            f"was written by CRIU {there.criu_version}",
            f"this host has the older version {here.criu_version}",
            f"install CRIU {there.criu_version} or newer",
        )
    if subject.members and there.driver_version != here.driver_version:
        return _Rule(
            f"is of driver {there.driver_version}",
            f"this host has {here.driver_version or 'none'}",
            f"install driver {there.driver_version}, or run the workload again",
        )
    for model in sorted({gpu.model for gpu in subject.gpus}):
        wanted = sum(gpu.model == model for gpu in subject.gpus)
        if models.get(model, 0) < wanted:
            return _Rule(
                f"needs {wanted} of {model}",
                f"this host has {models.get(model, 0)}",
                "restore it on a host with enough of these GPUs",
            )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdecimal() else 0 for part in version.split("."))
