"""Labels and annotations of workloads, which clients set and the coordinator keeps. Pure."""

import hashlib
import re
from collections.abc import Mapping, MutableMapping
from typing import Final

from google.protobuf.field_mask_pb2 import FieldMask
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import Workload

from leasehold_coordinator.errors import FleetError, invalid

LABELS_LIMIT_BYTES: Final = 4_096
"""Keys and values of the labels of a workload together. Lists and watches carry them."""

ANNOTATIONS_LIMIT_BYTES: Final = 16_384
"""Keys and values of the annotations of a workload together."""

_KEY: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./-]{0,126}[A-Za-z0-9])?")


def check_metadata(field: str, labels: Mapping[str, str], annotations: Mapping[str, str]) -> None:
    """Checks the keys and sizes of labels and annotations.

    Args:
        field: Path of their message, with a dot at its end. Empty: the request itself.
        labels: The labels.
        annotations: The annotations.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    _check(f"{field}labels", labels, LABELS_LIMIT_BYTES)
    _check(f"{field}annotations", annotations, ANNOTATIONS_LIMIT_BYTES)


def _check(field: str, texts: Mapping[str, str], limit_bytes: int) -> None:
    for key in texts:
        if not _KEY.fullmatch(key):
            raise invalid(
                field,
                f"invalid key {key[:64]!r} in {field}: use at most 128 letters, digits, '-', '_', '.' and "
                "'/', with a letter or digit at both ends",
            )
    used_bytes = sum(len(key.encode()) + len(value.encode()) for key, value in texts.items())
    if used_bytes > limit_bytes:
        raise invalid(field, f"{field} has {used_bytes} bytes, and the limit is {limit_bytes}: give less")


def etag_of(workload: Workload) -> str:
    """The etag of a workload: a digest of its labels and annotations."""
    digest = hashlib.blake2b(digest_size=8)
    for field, texts in _texts(workload).items():
        for key, value in sorted(texts.items()):
            for text in (field, key, value):
                digest.update(len(text.encode()).to_bytes(4, "big") + text.encode())
    return digest.hexdigest()


def check_etag(workload: Workload, etag: str) -> None:
    """Refuses a change that is based on other labels or annotations than those of the workload.

    Raises:
        FleetError: ETAG_MISMATCH.
    """
    if etag and etag != etag_of(workload):
        raise FleetError(
            errors_pb2.ERROR_REASON_ETAG_MISMATCH,
            f"the labels or annotations of workload {workload.name} have changed: the etag is "
            f"{etag_of(workload)!r} and not {etag[:64]!r}; read the workload again, and repeat the change",
            field="etag",
        )


def updated(known: Workload, wanted: Workload, mask: FieldMask | None) -> Workload:
    """A workload with new labels or annotations.

    Args:
        known: The workload.
        wanted: The new values.
        mask: The fields to replace. None: those that are not empty in the new values.

    Raises:
        FleetError: INVALID_ARGUMENT: the mask names another field, or a value breaks a rule.
    """
    workload = Workload()
    workload.CopyFrom(known)
    given, changed = _texts(wanted), _texts(workload)
    for field in _masked(given, mask):
        changed[field].clear()
        changed[field].update(given[field])
    check_metadata("workload.", workload.labels, workload.annotations)
    return workload


def _texts(workload: Workload) -> dict[str, MutableMapping[str, str]]:
    """The fields that UpdateWorkload changes, by path."""
    return {"labels": workload.labels, "annotations": workload.annotations}


def _masked(given: Mapping[str, Mapping[str, str]], mask: FieldMask | None) -> list[str]:
    if mask is None:
        return [field for field, texts in given.items() if texts]
    paths = {field for path in mask.paths for field in (given if path == "*" else (path,))}
    for path in sorted(paths - {*given}):
        raise invalid(
            "update_mask", f"the field {path[:64]!r} can't be updated: give labels, annotations or '*'"
        )
    return sorted(paths)
