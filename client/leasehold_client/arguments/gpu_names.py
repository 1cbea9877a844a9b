"""What people may call a GPU: its UUID, a unique beginning of it, or worker/slot. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold.v1.fleet_pb2 import FleetGpu

_GPU_UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def resolve_gpu(name: str, gpus: Sequence[FleetGpu]) -> str:
    """The UUID of the GPU that is meant.

    Args:
        name: A UUID or a unique beginning of one, with or without ``GPU-``, or ``worker/slot``.
        gpus: The GPUs of the fleet.

    Raises:
        UsageError: None is meant, or several are.
    """
    if not name:
        raise UsageError("an empty name is no GPU: give a UUID, its beginning, or worker/slot")
    if "/" in name:
        return _resolve_slot(name, gpus)
    beginning = "GPU-" + name.lower().removeprefix("gpu-")
    found = {gpu.gpu.uuid for gpu in gpus if gpu.gpu.uuid.lower().startswith(beginning.lower())}
    whole = [uuid for uuid in found if uuid.lower() == beginning.lower()]
    if len(found) == 1 or whole:
        return (whole or list(found))[0]
    if found:
        raise UsageError(f"{name!r} is the beginning of {len(found)} GPUs' UUIDs: give more of it")
    raise UsageError(f"no GPU has a UUID that begins with {name!r}: `leasehold get gpus` lists them")


def _resolve_slot(name: str, gpus: Sequence[FleetGpu]) -> str:
    worker, _, slot = name.rpartition("/")
    if not slot.isdecimal():
        raise UsageError(f"{name!r} is not worker/slot: the slot is a number, such as {worker or 'alpha'}/0")
    found = [
        gpu.gpu.uuid
        for gpu in gpus
        if worker in (gpu.worker_name, gpu.worker_id) and gpu.gpu.slot == int(slot)
    ]
    if len(found) > 1:
        raise UsageError(f"several workers are named {worker!r}: name the GPU by UUID")
    if not found:
        raise UsageError(f"no GPU is at {name!r}: `leasehold get gpus` lists them")
    return found[0]


def resolve_list(names: str, gpus: Sequence[FleetGpu]) -> list[str]:
    """The UUIDs of a comma-separated list, in its order.

    Raises:
        UsageError: A name is wrong, or a GPU is named twice.
    """
    uuids = [resolve_gpu(name.strip(), gpus) for name in names.split(",")]
    if len(set(uuids)) != len(uuids):
        raise UsageError(f"{names!r} names a GPU twice: name each once")
    return uuids


def resolve_pair(text: str, gpus: Sequence[FleetGpu]) -> tuple[str, str]:
    """The UUIDs of OLD=NEW.

    Raises:
        UsageError: It is not a pair, or a name in it is wrong.
    """
    old, equals, new = text.partition("=")
    if not equals or not old or not new:
        raise UsageError(f"{text!r} is not a pair: write OLD=NEW, such as alpha/0=alpha/1")
    return resolve_gpu(old, gpus), resolve_gpu(new, gpus)


def pair_in_order(held: Sequence[str], wanted: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs the GPUs that a workload holds with those that it is to get, in its order.

    Raises:
        UsageError: There are more of the one than of the other.
    """
    if len(held) != len(wanted):
        raise UsageError(
            f"{len(wanted)} GPUs are named and the workload holds {len(held)}: name one for each"
        )
    return list(zip(held, wanted, strict=True))


def gpu_place(gpu: FleetGpu) -> str:
    """The short name of a GPU: worker/slot."""
    return f"{gpu.worker_name}/{gpu.gpu.slot}"


def gpu_places(gpus: Iterable[FleetGpu]) -> dict[str, str]:
    """Short names of GPUs, worker/slot, by UUID."""
    return {gpu.gpu.uuid: gpu_place(gpu) for gpu in gpus}


def names_gpus(text: str) -> bool:
    """Whether a text names a GPU by UUID."""
    return _GPU_UUID.search(text) is not None


def with_places(text: str, places: Mapping[str, str]) -> str:
    """A text of a worker, which names GPUs by UUID, with their short names."""
    return _GPU_UUID.sub(lambda found: places.get(found[0], found[0]), text)
