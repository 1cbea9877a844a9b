"""The worker's settings and their defaults."""

import os
import socket
from pathlib import Path
from typing import Final, Literal, TypeAlias

import msgspec

from leasehold_worker.applications.timeouts import DEFAULT_TIMEOUTS, START_TIMEOUT_S
from leasehold_worker.byte_sizes import parse_size
from leasehold_worker.driver.helper_pool import CALL_FLOOR_S
from leasehold_worker.driver.verification import DEFAULT_TIMEOUT_S
from leasehold_worker.errors import StartError
from leasehold_worker.leasing.suspend_memory import DEFAULT_RESERVE_BYTES
from leasehold_worker.local_api.metrics_tls import MetricsTlsFiles
from leasehold_worker.log_format import LogFormat
from leasehold_worker.programs.output_bounds import DEFAULT_LIMIT_BYTES
from leasehold_worker.programs.run_as import MIN_UID, RunAsSetting
from leasehold_worker.session.channel import INSECURE_SCHEME

DEFAULT_COORDINATOR: Final = "127.0.0.1:7401"
StopWorkloads: TypeAlias = Literal["leave", "park", "stop"]


def default_credentials_directory() -> Path:
    """The default state directory of this user's coordinators.

    Raises:
        StartError: The user has no home directory.
    """
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    except RuntimeError:
        raise StartError("this user has no home directory: set HOME or XDG_STATE_HOME") from None
    return Path(base) / "leasehold"


def default_state_directory() -> Path:
    """The default state directory of a worker."""
    return default_credentials_directory() / "worker"


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's settings. Its fields are the keys of the file."""

    coordinator: str = DEFAULT_COORDINATOR
    """Address of the coordinator's listener for workers, HOST:PORT, or insecure:HOST:PORT without TLS."""
    credentials: Path | None = None
    """Directory of ca.pem and worker.token. None: the state directory of this user's coordinators."""
    state_dir: Path = msgspec.field(default_factory=default_state_directory)
    """Directory of this worker alone, with its id, its epoch, and its workloads' output."""
    name: str = msgspec.field(default_factory=socket.gethostname)
    """Name of the worker."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: LogFormat = "text"
    """text or json, on standard error."""
    labels: dict[str, str] = {}
    """Sent with hello."""
    driver_call_floor_s: float = CALL_FLOOR_S
    """Least deadline of any driver call. Those that move memory get three times their estimate more."""
    proof_timeout_s: float = DEFAULT_TIMEOUT_S
    """Time for NVML to agree with the driver."""
    stop_workloads: StopWorkloads = "leave"
    """Action of a stop on the worker's workloads: leave them running, suspend them, or stop them."""
    host_memory_reserve_bytes: int = DEFAULT_RESERVE_BYTES
    """Host memory that suspends may not use."""
    cpu_limit_millicores: int = 0
    """CPU time of all workloads together, in thousandths of a core. 0: all of it."""
    memory_limit: str | int = 0
    """Host memory of all workloads together: bytes, or a size such as "400GiB". 0: all of it."""
    disk_reserve: str | int = 0
    """Disk kept free on the state directory's volume: bytes, or a size. At least a tenth is kept free."""
    health_listen: str = ""
    """Address for health checks without TLS and identity, HOST:PORT. Empty: none."""
    metrics_listen: str = ""
    """Address for metrics, HOST:PORT, or insecure:HOST:PORT without TLS. Empty: none."""
    metrics_tls_certificate: Path | None = None
    """File with the server's certificate for metrics, as PEM. Off loopback, all three files are needed."""
    metrics_tls_key: Path | None = None
    """File with the private key of ``metrics_tls_certificate``, as PEM."""
    metrics_tls_client_ca: Path | None = None
    """File with the authorities of clients for metrics, as PEM."""
    socket: Path | None = None
    """Socket of the local API. None: worker.sock in the state directory."""
    socket_group: str = ""
    """Group that may use the local API, besides root and the worker's user. Empty: the worker's own group."""
    output_limit: str | int = DEFAULT_LIMIT_BYTES
    """Disk usage of a workload's output: bytes, or a size. Beyond it, the oldest part is dropped."""
    inherited_variables: list[str] = []
    """Further variables of the worker that programs and hooks inherit; a star stands for any characters."""
    adopt_users: list[str] = []
    """Users, by name or number, whose processes may be adopted; "*" is all users. Empty: the worker's own, or
    all users if the worker is root. With run_as: users besides the owner's Unix user; "*" excludes root."""
    run_as: RunAsSetting = ""
    """Unix users of workloads: a map of owners to users, "same-name", or one user. A user is a login name, or
    UID:GID. Empty: only the worker's own user starts programs, for a coordinator on loopback."""
    run_as_min_uid: int = MIN_UID
    """Smallest user id of run_as."""
    user_priority_limit: int = 0
    """Highest priority of claims of users other than root and the worker's."""
    image_dir: Path | None = None
    """Directory for process images and application checkpoints; workers may share it. None: images in the
    state directory."""
    checkpoint_limit: str | int = 0
    """Budget of all checkpoints: bytes, or a size. 0: as much as the disk has, less disk_reserve."""
    checkpoint_expiry_s: float = 7 * 86_400.0
    """Age at which unneeded checkpoints are deleted."""
    keep_images: bool = False
    """Keep process images even after a restore."""
    kernel_quiescence_s: float = DEFAULT_TIMEOUTS.quiescence_s
    """Time for a checkpointable application to quiesce."""
    kernel_start_s: float = START_TIMEOUT_S
    """Time for a program's application to register after a start for a restore."""
    parked_memory_limit: str | int = 0
    """Host memory of all suspended workloads together: bytes, or a size. 0: no limit of its own."""
    criu: str = ""
    """The criu program. Empty: the one on PATH."""
    gpus: list[str] = []
    """UUIDs of the GPUs that this worker serves. Empty: all of the host's."""
    gpu_units: dict[str, int] = {}
    """Throughput units of GPU models by a part of the product name. They override the default table."""

    @property
    def credentials_path(self) -> Path:
        """``credentials``, or its default."""
        return self.credentials or default_credentials_directory()

    @property
    def socket_path(self) -> Path:
        """Path of the local API's socket."""
        return self.socket or self.state_dir / "worker.sock"

    @property
    def metrics_address(self) -> str:
        """``metrics_listen`` without its scheme."""
        return self.metrics_listen.removeprefix(INSECURE_SCHEME)

    @property
    def metrics_tls_files(self) -> MetricsTlsFiles | None:
        """The files of TLS for metrics. None: there are none."""
        certificate, key = self.metrics_tls_certificate, self.metrics_tls_key
        client_ca = self.metrics_tls_client_ca
        if certificate is None or key is None or client_ca is None:
            return None
        return MetricsTlsFiles(certificate, key, client_ca)

    @property
    def image_path(self) -> Path:
        """Directory of checkpoints."""
        return self.image_dir or self.state_dir / "images"

    @property
    def output_limit_bytes(self) -> int:
        """``output_limit`` in bytes."""
        return _size_bytes("output_limit", self.output_limit)

    @property
    def checkpoint_limit_bytes(self) -> int:
        """``checkpoint_limit`` in bytes."""
        return _size_bytes("checkpoint_limit", self.checkpoint_limit)

    @property
    def parked_memory_limit_bytes(self) -> int:
        """``parked_memory_limit`` in bytes."""
        return _size_bytes("parked_memory_limit", self.parked_memory_limit)

    @property
    def memory_limit_bytes(self) -> int:
        """``memory_limit`` in bytes."""
        return _size_bytes("memory_limit", self.memory_limit)

    @property
    def disk_reserve_bytes(self) -> int:
        """``disk_reserve`` in bytes."""
        return _size_bytes("disk_reserve", self.disk_reserve)


def _size_bytes(name: str, size: str | int) -> int:
    try:
        return parse_size(size) if isinstance(size, str) else size
    except ValueError as error:
        raise StartError(f"{name}: {error}") from error
