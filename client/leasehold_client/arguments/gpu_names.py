"""Names of GPUs: a UUID, a unique prefix of a UUID, or worker/slot. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold.v1.worker_pb2 import FleetGpu

_IDS: Final = re.compile(
    r"`leasehold [^`]*`"
    r"|(?<!')GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|(?<!/)\bw-[0-9a-f]{12}\b(?!/)"
)
"""Commands, UUIDs of GPUs, and ids of workloads that are no part of a path.

A command keeps its ids, which stay right when a place gets another GPU. A quoted UUID stays as it was given.
"""

SHORT_UUID: Final = len("GPU-") + 8
"""Characters of a UUID that are enough for people."""


def resolve_gpu(name: str, gpus: Sequence[FleetGpu]) -> str:
    """Resolves a name to a UUID.

    Args:
        name: A UUID or a unique prefix of a UUID, with or without ``GPU-``, or ``worker/slot``.
        gpus: The GPUs of the fleet.

    Raises:
        UsageError: No GPU matches, or several GPUs match.
    """
    if not name:
        raise UsageError("a GPU's name is empty: write a UUID, a prefix of a UUID, or worker/slot")
    if "/" in name:
        return _resolve_slot(name, gpus)
    beginning = "GPU-" + name.lower().removeprefix("gpu-")
    found = {gpu.gpu.uuid for gpu in gpus if gpu.gpu.uuid.lower().startswith(beginning.lower())}
    whole = [uuid for uuid in found if uuid.lower() == beginning.lower()]
    if len(found) == 1 or whole:
        return (whole or list(found))[0]
    if found:
        raise UsageError(f"{name!r} is a prefix of {len(found)} UUIDs: write more of the UUID")
    raise UsageError(f"no GPU has a UUID that begins with {name!r}: `leasehold get gpus` lists GPUs")


def _resolve_slot(name: str, gpus: Sequence[FleetGpu]) -> str:
    worker, _, slot = name.rpartition("/")
    if not slot.isdecimal():
        raise UsageError(
            f"{name!r} is not worker/slot: write the slot as a number, such as {worker or 'alpha'}/0"
        )
    found = [
        gpu.gpu.uuid
        for gpu in gpus
        if worker in (gpu.worker_name, gpu.worker_id) and str(gpu.gpu.slot) == (slot.lstrip("0") or "0")
    ]
    if len(found) > 1:
        raise UsageError(f"several workers are named {worker!r}: write the UUID of the GPU")
    if not found:
        raise UsageError(f"no GPU is at {name!r}: `leasehold get gpus` lists GPUs")
    return found[0]


def resolve_list(names: str, gpus: Sequence[FleetGpu]) -> list[str]:
    """Resolves a comma-separated list of names to UUIDs, in order.

    Raises:
        UsageError: A name does not resolve, or a GPU is named twice.
    """
    uuids = [resolve_gpu(name.strip(), gpus) for name in names.split(",")]
    if len(set(uuids)) != len(uuids):
        raise UsageError(f"{names!r} names a GPU twice: name each GPU once")
    return uuids


def resolve_pair(text: str, gpus: Sequence[FleetGpu]) -> tuple[str, str]:
    """Resolves OLD=NEW to two UUIDs.

    Raises:
        UsageError: The text is not a pair, or a name does not resolve.
    """
    old, equals, new = text.partition("=")
    if not equals or not old or not new:
        raise UsageError(f"{text!r} is not a pair: write OLD=NEW, such as alpha/0=alpha/1")
    return resolve_gpu(old, gpus), resolve_gpu(new, gpus)


def pair_in_order(held: Sequence[str], wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs the GPUs of a workload with new GPUs, in order.

    Raises:
        UsageError: The counts differ.
    """
    if len(held) != len(wanted):
        raise UsageError(
            f"the list has {len(wanted)} GPUs, and the workload holds {len(held)}: name one new GPU for each"
        )
    return list(zip(held, wanted, strict=True))


def gpu_place(gpu: FleetGpu) -> str:
    """The short name of a GPU: worker/slot."""
    return f"{gpu.worker_name}/{gpu.gpu.slot}"


def gpu_places(gpus: Iterable[FleetGpu]) -> dict[str, str]:
    """Short names of GPUs, worker/slot, by UUID, and names of their holders, by id."""
    places = {}
    for gpu in gpus:
        places[gpu.gpu.uuid] = gpu_place(gpu)
        if gpu.workload_name:
            places[gpu.lease.workload_id] = gpu.workload_name
    return places


def places_text(uuids: Iterable[str], places: Mapping[str, str]) -> str:
    """Names GPUs by worker/slot, and unknown GPUs by the first digits of their UUIDs."""
    return ", ".join(places.get(uuid, uuid[:SHORT_UUID]) for uuid in uuids)


def has_ids(text: str) -> bool:
    """Whether a text contains what :func:`with_places` may replace."""
    return any(not found[0].startswith("`") for found in _IDS.finditer(text))


def with_places(text: str, places: Mapping[str, str]) -> str:
    """Replaces UUIDs of GPUs and ids of their holders in a text by names. Commands and quoted UUIDs stay."""
    return _IDS.sub(lambda found: places.get(found[0], found[0]), text)
