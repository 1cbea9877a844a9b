"""Reads the worker's settings from flags, LEASEHOLD_* variables and a TOML file, and checks them."""

import codecs
import errno
import os
import re
import stat
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from leasehold_worker.agent.config import DEFAULT_COORDINATOR, WorkerConfig
from leasehold_worker.agent.settings_keys import explain, require_known, require_no_nul
from leasehold_worker.errors import OperationError, StartError
from leasehold_worker.files.enrolment_file import read_enrolment
from leasehold_worker.gpus.uuids import normalize_uuid
from leasehold_worker.programs.run_as import check_run_as, is_loopback
from leasehold_worker.session.channel import INSECURE_SCHEME

LOG_LEVELS: Final = ("debug", "info", "warning", "error")

TIME_LIMIT_S: Final = 1e9
"""The longest time of a setting, of 32 years: Python's dates end."""

NUMBER_LIMIT: Final = 2**63 - 1
"""The largest number of bytes or of thousandths of a core."""

SYSTEM_FILE: Final = Path("/etc/leasehold/worker.toml")
WORKER_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
"""Pattern of a name, as the coordinator requires: it appears in `worker/slot`."""

LABEL_KEY: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./-]{0,126}[A-Za-z0-9])?")
"""Pattern of a label's key, as of a workload's."""

LABELS_LIMIT_BYTES: Final = 4_096
"""Keys and values of the labels together. Each list and watch of workers carries them."""

MIN_OUTPUT_LIMIT_BYTES: Final = 65_536

FILE_LIMIT_BYTES: Final = 1_000_000
"""Size limit of a settings file."""


def load_config(
    path: Path | None, ticket_name: str = "", owner_uid: int | None = None, /, **flags: object
) -> WorkerConfig:
    """Reads the file, and overrides its settings by flags. An enrolment gives name and coordinator.

    Args:
        path: The file. None: the system's, if there is one.
        ticket_name: The name in the join token, if file and flags give none. Empty: none.
        owner_uid: The worker's user. None: that of this process.
        flags: Fields by name; None for those that were not given.

    Raises:
        StartError: The file can't be read, or breaks a rule; the text says which.
    """
    file = path or (SYSTEM_FILE if SYSTEM_FILE.exists() else None)
    config, keys = (WorkerConfig(), frozenset[str]()) if file is None else _read(file)
    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        if value == "":
            raise StartError(f"--{name.replace('_', '-')} is empty: give a value, or leave it out")
    config = msgspec.structs.replace(config, **given)
    config = _with_enrolment(config, ticket_name, owner_uid, keys | given.keys())
    # Programs start in other directories than the worker.
    config = msgspec.structs.replace(
        config,
        state_dir=config.state_dir.absolute(),
        image_dir=config.image_dir.absolute() if config.image_dir else None,
    )
    if "gpus" in keys and not config.gpus:
        raise StartError("gpus names no GPU: name one or more, or leave it out for all of this host's")
    gpus = [_gpu_uuid(text) for text in config.gpus]
    if doubled := {uuid for uuid in gpus if gpus.count(uuid) > 1}:
        raise StartError(f"gpus names {min(doubled)} twice: name each GPU once")
    config = msgspec.structs.replace(config, gpus=gpus)
    _check(config)
    return config


def _check(config: WorkerConfig) -> None:
    """Checks the values of settings.

    Raises:
        StartError: A value breaks a rule.
    """
    host, _, port = config.coordinator.removeprefix(INSECURE_SCHEME).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StartError(
            f"the coordinator's address {config.coordinator!r} is not HOST:PORT: write it like "
            f"{DEFAULT_COORDINATOR}"
        )
    _check_listener("health checks", config.health_listen, "0.0.0.0:7404")
    _check_listener("metrics", config.metrics_address, "127.0.0.1:7407")
    _check_metrics(config)
    if not WORKER_NAME.fullmatch(config.name):
        raise StartError(
            f"invalid worker name {config.name!r}: use 1 to 64 letters, digits, '-', '_' or '.', and start "
            "with a letter or digit (--name)"
        )
    if config.log_level not in LOG_LEVELS:
        raise StartError(f"unknown log level {config.log_level!r}: give one of {', '.join(LOG_LEVELS)}")
    for name in (
        *("driver_call_floor_s", "proof_timeout_s", "checkpoint_expiry_s"),
        *("kernel_quiescence_s", "kernel_start_s"),
    ):
        if not 0 < getattr(config, name) <= TIME_LIMIT_S:
            raise StartError(
                f"{name} {getattr(config, name)} is not a time: give seconds greater than 0, and at most "
                f"{TIME_LIMIT_S:g}"
            )
    for name, number in {
        "host_memory_reserve_bytes": config.host_memory_reserve_bytes,
        "cpu_limit_millicores": config.cpu_limit_millicores,
        "memory_limit": config.memory_limit_bytes,
        "disk_reserve": config.disk_reserve_bytes,
        "checkpoint_limit": config.checkpoint_limit_bytes,
        "parked_memory_limit": config.parked_memory_limit_bytes,
    }.items():
        if not 0 <= number <= NUMBER_LIMIT:
            raise StartError(f"{name} {number} is out of range: give 0 to {NUMBER_LIMIT}")
    _check_labels(config.labels)
    if config.output_limit_bytes < MIN_OUTPUT_LIMIT_BYTES:
        raise StartError(
            f"output_limit {config.output_limit} is too small: give {MIN_OUTPUT_LIMIT_BYTES} bytes or more"
        )
    check_run_as(config.run_as, config.run_as_min_uid)
    for model, units in config.gpu_units.items():
        if not model.strip() or units < 1:
            raise StartError(
                f"gpu_units of {model!r} are {units}: name a part of the product's name, and give 1 or more"
            )


def _check_listener(use: str, address: str, example: str) -> None:
    host, _, port = address.rpartition(":")
    if address and not (host and port.isdecimal() and int(port) < 65536):
        raise StartError(f"the address for {use} {address!r} is not HOST:PORT: write it like {example}")


def _check_labels(labels: Mapping[str, str]) -> None:
    for key in labels:
        if not LABEL_KEY.fullmatch(key):
            raise StartError(
                f"invalid key {key[:64]!r} in labels: use at most 128 letters, digits, '-', '_', '.' and "
                "'/', with a letter or digit at both ends"
            )
    used_bytes = sum(len(text.encode()) for label in labels.items() for text in label)
    if used_bytes > LABELS_LIMIT_BYTES:
        raise StartError(f"labels have {used_bytes} bytes, and the limit is {LABELS_LIMIT_BYTES}: give less")


def _check_metrics(config: WorkerConfig) -> None:
    """Refuses metrics that other hosts could read without a certificate, unless the settings say so."""
    files = config.metrics_tls_certificate, config.metrics_tls_key, config.metrics_tls_client_ca
    is_insecure = config.metrics_listen.startswith(INSECURE_SCHEME)
    if any(files) and (not all(files) or is_insecure or not config.metrics_listen):
        raise StartError(
            "metrics_tls_certificate, metrics_tls_key and metrics_tls_client_ca belong together, and to an "
            "address metrics_listen without insecure: give all of them, or none"
        )
    if config.metrics_listen and not (any(files) or is_insecure or is_loopback(config.metrics_listen)):
        raise StartError(
            f"the address for metrics {config.metrics_listen!r} is off loopback, and has no TLS: give "
            "metrics_tls_certificate, metrics_tls_key and metrics_tls_client_ca in the settings file, or "
            f"write {INSECURE_SCHEME}{config.metrics_listen} if only a trusted network reaches it"
        )


def _with_enrolment(
    config: WorkerConfig, ticket_name: str, owner_uid: int | None, given: Collection[str]
) -> WorkerConfig:
    """The settings with the name and the coordinator of the worker's enrolment, unless others are given."""
    try:
        enrolment = read_enrolment(config.state_dir, owner_uid)
    except (
        OSError
    ):  # `leasehold doctor` may run as another user; a worker says so when it opens the directory
        enrolment = None
    name = ticket_name or (enrolment.name if enrolment is not None else "")
    if name and "name" not in given:
        config = msgspec.structs.replace(config, name=name)
    if enrolment is not None and enrolment.coordinator and "coordinator" not in given:
        config = msgspec.structs.replace(config, coordinator=enrolment.coordinator)
    return config


def _gpu_uuid(text: str) -> str:
    try:
        return normalize_uuid(text)
    except OperationError as error:
        raise StartError(f"gpus: {error.message}") from error


def _content(path: Path) -> bytes:
    """The content of a settings file, without a byte order mark.

    Raises:
        OSError: The file can't be read, is not a regular file, or is too large. A pipe or a device may never
            end.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        data = file.read(FILE_LIMIT_BYTES + 1)
    if len(data) > FILE_LIMIT_BYTES:
        raise OSError(errno.EFBIG, f"larger than the limit of {FILE_LIMIT_BYTES} bytes")
    return data.removeprefix(codecs.BOM_UTF8)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read(path: Path) -> tuple[WorkerConfig, frozenset[str]]:
    """The settings in a file, and its keys."""
    try:
        document = msgspec.toml.decode(_content(path), type=dict[str, Any])
        require_known(path, document, WorkerConfig.__struct_fields__)
        require_no_nul(path, document)
        config = msgspec.convert(document, WorkerConfig, dec_hook=_decode_path)
        return config, frozenset(document)
    except OSError as error:
        raise StartError(
            f"the configuration {path} can't be read: {error.strerror}; give another with --config"
        ) from error
    except msgspec.ValidationError as error:
        raise StartError(f"the configuration {path} has an invalid value of {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise StartError(
            f"the configuration {path} is not UTF-8 (byte {error.start + 1}): write it as UTF-8"
        ) from error
    except msgspec.DecodeError as error:
        raise StartError(f"the configuration {path} is malformed: {error}") from error


def _decode_path(wanted: type, value: object) -> Path:
    """A path of the file, which TOML stores as a string."""
    if wanted is not Path or not isinstance(value, str):
        raise TypeError(f"{value!r} is not a path: write a string")
    if not value:  # an empty path would be the present directory
        raise ValueError("the path is empty: give a path, or leave it out")
    return Path(value)
