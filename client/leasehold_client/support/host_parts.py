"""The parts of the bundle about this host."""

import json
import os
import platform
import sys
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from leasehold_client import config
from leasehold_client.errors import LeaseholdError
from leasehold_client.installation.services import DEFAULT_USERS, Service
from leasehold_client.support.bounded_run import run_bounded
from leasehold_client.support.members import MEMBER_LIMIT_BYTES, Part, document
from leasehold_client.support.redaction import Fields, kept_fields, kept_settings, without_secrets

LOG_LINES: Final = 5_000
SYSTEMD: Final = Path("/run/systemd/system")
_DRIVER: Final = Path("/proc/driver/nvidia/version")

UNIT_PROPERTIES: Final = (
    *("LoadState", "UnitFileState", "ActiveState", "SubState", "Result", "ExecMainStatus", "NRestarts"),
    *("ActiveEnterTimestamp", "InactiveEnterTimestamp", "MainPID", "User", "ControlGroup", "Delegate"),
    *("MemoryCurrent", "TasksCurrent", "LimitNOFILE", "LimitCORE", "AmbientCapabilities", "FragmentPath"),
    *("DropInPaths", "NeedDaemonReload", "WatchdogUSec", "StatusErrno"),
)
"""Properties without environment and command lines."""

MEMBER: Final[Fields] = {"pid": None, "state": None, "start_time_ticks": None, "device_memory_bytes": None}
LEASE: Final[Fields] = {"lease_id": None, "gpu_uuids": None, "grant_time": None, "fencing_token": None}
ERROR: Final[Fields] = {"reason": None, "message": None}
WORKLOAD: Final[Fields] = {
    **dict.fromkeys(("workload_id", "name", "worker_id", "create_time", "origin", "out_of_contact")),
    "status": {
        **dict.fromkeys(("state", "generation", "root_pid", "parked_gpu_uuids", "parked_bytes", "park_time")),
        **dict.fromkeys(("start_time", "end_time", "exit", "checkpoint_id", "ready_time", "yielded")),
        "lease": LEASE,
        "members": MEMBER,
        "error": ERROR,
    },
}
"""A workload without its program, its environment, its hooks, its labels and its annotations."""

GPU_LEASE: Final[Fields] = {
    **dict.fromkeys(("gpu_uuid", "slot", "state", "lease_id", "workload_id", "since", "health", "sample")),
    "health_reason": None,
    "foreign_processes": {"pid": None, "device_memory_bytes": None, "workload_id": None},
}
LEASES: Final[Fields] = {
    "gpus": GPU_LEASE,
    "workloads": WORKLOAD,
    "resources": None,
    "coordinator_clock_offset": None,
}


def host_parts(timeout_s: float) -> list[Part]:
    """The parts of this host.

    Args:
        timeout_s: Timeout of each part.
    """
    services = [Service(name, user) for name, user in DEFAULT_USERS.items()]
    parts = [
        Part("versions.json", "versions of Python, its packages, the kernel and the driver", _versions),
        Part("settings.json", "settings files, without values of unknown settings", _settings),
        Part("doctor.json", "findings of `leasehold doctor`", partial(_doctor, timeout_s)),
        Part(
            "leases.json",
            "GPUs and workloads of the worker, with the driver's states of their processes",
            partial(_leases, timeout_s),
        ),
        Part(
            "journal.json",
            "states, leases and counts in the worker's journal",
            partial(_journal, timeout_s),
        ),
        Part("store.json", "counts and newest times in the coordinator's store", partial(_store, timeout_s)),
    ]
    for service in services:
        unit = partial(_unit, service.unit, timeout_s)
        log = partial(_log, service.unit, timeout_s)
        parts += [
            Part(f"unit-{service.name}.txt", f"state of {service.unit}", unit),
            Part(f"log-{service.name}.txt", f"the last {LOG_LINES} lines of {service.unit}", log),
        ]
    return parts


def _versions() -> bytes:
    packages = {found.metadata["Name"]: found.version for found in distributions()}
    driver = _DRIVER.read_text(encoding="utf-8").partition("\n")[0] if _DRIVER.exists() else None
    return document(
        {
            "python": sys.version,
            "kernel": platform.release(),
            "architecture": platform.machine(),
            "libc": " ".join(platform.libc_ver()),
            "driver": driver,
            "packages": dict(sorted(packages.items())),
        }
    )


def _settings_files() -> Mapping[str, Path]:
    files = {
        "worker.toml": Path(os.environ.get("LEASEHOLD_WORKER_CONFIG") or "/etc/leasehold/worker.toml"),
        "coordinator.toml": Path(
            os.environ.get("LEASEHOLD_COORDINATOR_CONFIG") or "/etc/leasehold/coordinator.toml"
        ),
    }
    with suppress(FileNotFoundError):  # no home directory
        files["cli.toml"] = config.config_path()
    return files


def _read_settings(path: Path) -> dict[str, object] | None:
    """The settings in a file. None: there is no file.

    Raises:
        ValueError: The file is no TOML. The reason has no text of the file.
        OSError: The file can't be read.
    """
    try:
        return tomllib.loads(config.read_settings_file(path).decode())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not valid TOML") from None


def _settings() -> bytes:
    told: dict[str, object] = {}
    for name, path in _settings_files().items():
        try:
            found = _read_settings(path)
        except (OSError, ValueError) as error:
            told[name] = {"path": str(path), "error": str(error)}
            continue
        if found is not None:
            told[name] = {"path": str(path), "settings": kept_settings(name, found)}
    return document(told)


def _setting(file: str, key: str, variable: str, default: Path) -> Path:
    """A path that a daemon's setting names."""
    if named := os.environ.get(variable):
        return Path(named)
    found = (_read_settings(_settings_files()[file]) or {}).get(key)
    return Path(found) if isinstance(found, str) else default


def _own(*arguments: str) -> list[str]:
    """A command of this installation."""
    return [sys.executable, "-P", "-m", "leasehold_client", *arguments]


def _json(command: list[str], timeout_s: float, owner_of: Path | None = None) -> object:
    code, output = run_bounded(command, timeout_s, MEMBER_LIMIT_BYTES, owner_of=owner_of)
    try:
        found: object = json.loads(output)
    except ValueError:
        raise LeaseholdError(f"exit code {code}, and no JSON") from None
    return found


def _doctor(timeout_s: float) -> bytes:
    worker = Service("worker", DEFAULT_USERS["worker"])
    host = ["--host"] if SYSTEMD.is_dir() and worker.unit_path.exists() else []
    found = _json(_own("doctor", *host, "-o", "json", "--timeout", str(timeout_s / 5)), timeout_s)
    return document(kept_fields(found, {"checks": {"name": None, "result": None, "detail": None}}))


def _leases(timeout_s: float) -> bytes:
    found = _json(_own("local", "leases", "-o", "json"), timeout_s)
    return document(kept_fields(found, LEASES))


def _journal(timeout_s: float) -> bytes:
    default = config.state_directory() / "worker"
    directory = _setting("worker.toml", "state_dir", "LEASEHOLD_STATE_DIR", default)
    module = "leasehold_worker.diagnostics.journal_summary"
    return document(_json([sys.executable, "-P", "-m", module, str(directory)], timeout_s, directory))


def _store(timeout_s: float) -> bytes:
    file, variable = "coordinator.toml", "LEASEHOLD_COORDINATOR_STATE_DIR"
    directory = _setting(file, "state_dir", variable, config.state_directory())
    store = _setting(file, "database", "LEASEHOLD_DATABASE", directory / "coordinator.sqlite3")
    if ":/" in str(store):
        raise LeaseholdError("the store is on a database server")
    module = "leasehold_coordinator.server.store_summary"
    return document(_json([sys.executable, "-P", "-m", module, str(store)], timeout_s, store.parent))


def _unit(unit: str, timeout_s: float) -> bytes:
    command = ["systemctl", "show", f"--property={','.join(UNIT_PROPERTIES)}", unit]
    _, output = run_bounded(command, timeout_s, MEMBER_LIMIT_BYTES)
    if b"LoadState=not-found" in output:
        raise LeaseholdError(f"{unit} is not installed")
    return _text(output)


def _log(unit: str, timeout_s: float) -> bytes:
    command = ["journalctl", "--unit", unit, "--lines", str(LOG_LINES), "--no-pager", "--quiet"]
    _, output = run_bounded([*command, "--output", "short-iso"], timeout_s, MEMBER_LIMIT_BYTES, keep_end=True)
    return _text(output)


def _text(output: bytes) -> bytes:
    return without_secrets(output.decode(errors="replace")).encode()
