"""Checks of the host and its worker for ``leasehold doctor``. They change nothing."""

import fcntl
import os
import platform
import socket
import ssl
from pathlib import Path
from typing import Final

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.diagnostics.examination import Examination, failed, not_checked, warning
from leasehold_worker.errors import StartError
from leasehold_worker.files.enrolment_file import Enrolment, read_enrolment
from leasehold_worker.files.private_directories import require_private
from leasehold_worker.host import cgroups, processes
from leasehold_worker.host.capabilities import DAC_OVERRIDE, SETUID, SYS_PTRACE, is_effective
from leasehold_worker.planning.driver_checks import PROVEN_ARCHITECTURE
from leasehold_worker.session.channel import FILES, INSECURE_SCHEME
from leasehold_worker.session.client_keys import require_valid

CONNECT_TIMEOUT_S: Final = 2.0
_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def kernel(patient: Examination) -> str:
    """Linux with pidfds."""
    name = f"{platform.system()} {platform.release()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        raise failed(f"{name} has no pidfd ({error}): Linux 5.3 or newer is needed") from error
    return name


def proc(patient: Examination) -> str:
    """Whether /proc shows the processes of other users."""
    try:
        Path("/proc/1/stat").read_bytes()
    except OSError as error:
        raise failed(
            f"/proc hides the processes of other users ({error.strerror}): mount it without "
            "hidepid, or run the worker as root"
        ) from error
    return "shows the processes of all users"


def architecture(patient: Examination) -> str:
    """Whether checkpoints are verified on the processor."""
    machine = platform.machine()
    if machine != PROVEN_ARCHITECTURE:
        raise warning(
            f"checkpoints are verified only on {PROVEN_ARCHITECTURE}, and this host is "
            f"{machine}: run `leasehold validate`"
        )
    return machine


def trace_permission(patient: Examination) -> str:
    """Whether the driver's calls may reach into a workload, as measured on a child of the doctor's.

    The child has the doctor's user. The capabilities say whether the same holds for other users.
    """
    scope = _first_line(_YAMA) or "none"
    capability = "with" if is_effective(SYS_PTRACE) else "without"
    who = f"uid {os.geteuid()}, {capability} CAP_SYS_PTRACE, kernel.yama.ptrace_scope {scope}"
    if not patient.child_can_be_asked:
        raise not_checked(f"the driver helper did not answer ({who})")
    main = patient.service.main if patient.service is not None else None
    if main is not None and main.has(SYS_PTRACE) and not is_effective(SYS_PTRACE):
        raise not_checked(f"the worker has CAP_SYS_PTRACE, and this command lacks it ({who}): run it as root")
    if patient.trace_obstacle is not None:
        raise failed(f"the worker may not control its workloads ({who}), as {patient.trace_obstacle}")
    if is_effective(SYS_PTRACE) and (is_effective(DAC_OVERRIDE) or is_effective(SETUID)):
        return f"granted ({who})"
    return (
        f"granted for processes of the worker's own user only ({who}): those of other users need "
        "CAP_SYS_PTRACE and CAP_SETUID, or root"
    )


def host_memory(patient: Examination) -> str:
    """Whether host memory could hold the content of a full GPU."""
    available = processes.memory_bytes("MemAvailable")
    if available is None:
        raise not_checked("the kernel does not report MemAvailable")
    left = max(0, available - patient.config.host_memory_reserve_bytes)
    largest = _largest_gpu_bytes(patient)
    if left < largest:
        raise warning(
            f"{size_text(left)} are free beyond the reserve, and one GPU has "
            f"{size_text(largest)}: a full one can't be suspended until memory is freed or "
            "added"
        )
    return f"{size_text(left)} free beyond the reserve"


def cgroup_memory(patient: Examination) -> str:
    """Whether the control group of workloads could hold the content of a full GPU."""
    limits = cgroups.memory_limits(cgroups.memory_groups(os.getpid()))
    if not limits:
        return "no limit"
    tightest = min(limits, key=lambda limit: limit.available_bytes)
    left, largest = tightest.available_bytes, _largest_gpu_bytes(patient)
    if left < largest:
        raise warning(
            f"{tightest.path} has {size_text(left)} left, and one GPU has {size_text(largest)}: raise "
            "memory.max of the worker's unit or container"
        )
    return f"{size_text(left)} left in {tightest.path}"


def _largest_gpu_bytes(patient: Examination) -> int:
    """The memory of the largest GPU with a known size."""
    gpus = patient.gpus()
    known = [gpu.memory_total_bytes for gpu in gpus if gpu.memory_total_bytes is not None]
    if gpus and not known:
        raise not_checked("NVML reports no memory size for any GPU")
    return max(known, default=0)


def swap(patient: Examination) -> str:
    """Whether no memory is swapped out, since suspended memory would be next."""
    total, free = processes.memory_bytes("SwapTotal") or 0, processes.memory_bytes("SwapFree") or 0
    if total > free:
        raise warning(
            f"{size_text(total - free)} in use, and suspended memory in swap is slow to "
            "restore: free host memory, then swapoff -a"
        )
    return "not in use" if total else "none"


def huge_pages(patient: Examination) -> str:
    """The setting of transparent huge pages, which make suspends faster."""
    setting = _first_line(_HUGE_PAGES)
    if setting is None:
        raise not_checked("this kernel has no transparent huge pages")
    return setting.partition("[")[2].partition("]")[0] or setting


def criu(patient: Examination) -> str:
    """Whether processes can be written to disk, which is optional."""
    if isinstance(patient.criu, str):
        raise warning(f"images of processes can't be written, all else works: {patient.criu}")
    return f"{patient.criu.path} {patient.criu.version}"


def configuration(patient: Examination) -> str:
    """Whether the worker's configuration is valid."""
    if patient.config_error is not None:
        raise failed(patient.config_error)
    return f"worker {patient.config.name}"


def state_directory(patient: Examination) -> str:
    """Whether the worker can store its state. The check creates nothing and keeps no lock."""
    if patient.config_error is not None:
        raise not_checked("the configuration is invalid")
    path = patient.config.state_dir.absolute()
    nearest = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise failed(
            f"{nearest} is not a directory that uid {os.geteuid()} can write: choose another for {path}"
        )
    if nearest != path:
        return f"{path} will be created at the first start"
    try:
        require_private(path, "state directory", owner_uid=patient.worker_uid)
    except StartError as error:
        raise failed(str(error)) from error
    if not os.path.exists(path / "lock"):
        return f"{path}, writable"
    try:
        with (path / "lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"{path}, and a worker uses it"
    except OSError as error:
        raise failed(
            f"{path / 'lock'} can't be opened ({error.strerror}): run as the worker's user"
        ) from error
    return f"{path}, writable, and no worker uses it now"


def coordinator(patient: Examination) -> str:
    """Whether the coordinator answers, and whether its certificate is that of the worker's credentials."""
    if patient.config_error is not None:
        raise not_checked("the configuration is invalid")
    address = patient.config.coordinator
    host, _, port = address.removeprefix(INSECURE_SCHEME).rpartition(":")
    host = host.strip("[]")
    try:
        connection = socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S)
    except OSError as error:
        raise warning(
            f"{address} does not answer ({error.strerror or error}): start it, or set coordinator in "
            "worker.toml"
        ) from error
    with connection:
        if address.startswith(INSECURE_SCHEME):
            raise warning(
                f"{address} answers, and has no TLS: start the coordinator without --insecure, and write its "
                f"address without {INSECURE_SCHEME}"
            )
        if (enrolment := _enrolment(patient)) is not None:
            _handshake(connection, host, address, ssl.create_default_context(cadata=enrolment.authorities))
            return f"{address} answers, and this worker is {enrolment.identity}"
        certificate, token = (patient.config.credentials_path / name for name in FILES)
        try:
            token.read_bytes()
            context = ssl.create_default_context(cafile=str(certificate))
        except OSError as error:
            raise warning(
                f"the credentials in {certificate.parent} can't be used ({error.strerror or error}): copy "
                f"{' and '.join(FILES)} from the coordinator's state directory, or set credentials in "
                "worker.toml"
            ) from error
        _handshake(connection, host, address, context)
    return f"{address} answers, with the certificate of {certificate}"


def _enrolment(patient: Examination) -> Enrolment | None:
    """The worker's own certificate. None: it has none, or only the worker's user can read it."""
    try:
        enrolment = read_enrolment(patient.config.state_dir, patient.worker_uid)
        if enrolment is None or not enrolment.certificate:
            return None
        require_valid(enrolment)
    except OSError:
        return None
    except StartError as error:
        raise failed(str(error)) from error
    return enrolment


def _handshake(connection: socket.socket, host: str, address: str, context: ssl.SSLContext) -> None:
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(connection, server_hostname=host).close()
    except OSError as error:
        raise warning(
            f"TLS with {address} fails ({error}): docs/errors.md says what the causes mean"
        ) from error


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
