"""What may happen on a shared host, at random."""

import os
import random
import signal
from collections.abc import Callable, Sequence
from typing import Final

from leasehold.local.v1.local_service_pb2 import ListResponse
from leasehold.v1 import command_pb2, lease_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError
from leasehold_client.local import LocalWorker

from .shared_host import SharedHost

HOLDERS_LIMIT: Final = 7
RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING
SUSPENDED: Final = workload_pb2.WORKLOAD_STATE_SUSPENDED
WAIT_S: Final = 60.0

Step = Callable[[SharedHost, Client, random.Random], bool]
"""Does something; False where there was nothing to do it with."""


def start_exec(shared: SharedHost, _: Client, chance: random.Random) -> bool:
    """One of the two users runs a program."""
    if len(shared.living("exec", "helper", "claim")) >= HOLDERS_LIMIT:
        return False
    options = ["--priority", str(chance.choice([0, 0, 1])), "--cpu", chance.choice(["0.01", "0.02"])]
    shared.start("exec", chance.choice([1, 1, 2, 3]), *options, user=chance.choice(["ann", "bob"]))
    return True


def start_helper(shared: SharedHost, _: Client, chance: random.Random) -> bool:
    """Somebody runs a helper."""
    if len(shared.living("helper")) >= 2:
        return False
    shared.start("helper", chance.choice([1, 2]), user=chance.choice(["ann", "bob"]))
    return True


def start_claim(shared: SharedHost, _: Client, chance: random.Random) -> bool:
    """A program claims for itself."""
    if len(shared.living("exec", "helper", "claim")) >= HOLDERS_LIMIT:
        return False
    shared.start("claim", chance.choice([1, 2]), user=chance.choice(["ann", "bob"]))
    return True


def give_back(shared: SharedHost, _: Client, chance: random.Random) -> bool:
    """A program gives its claim back."""
    claims = shared.living("claim")
    if not claims:
        return False
    stdin = chance.choice(claims).process.stdin
    assert stdin is not None
    stdin.close()
    return True


def start_foreign(shared: SharedHost, _: Client, chance: random.Random) -> bool:
    """Somebody uses a GPU without asking."""
    free = [slot.gpu_uuid for slot in shared.look().gpus if slot.state == lease_pb2.SLOT_STATE_FREE]
    if not free or len(shared.living("foreign")) >= 2:
        return False
    shared.start("foreign", 1, gpu=chance.choice(free))
    return True


def kill_holder(shared: SharedHost, _: Client, chance: random.Random) -> bool:
    """A process dies."""
    return _signal(shared, chance, signal.SIGKILL)


def end_holder(shared: SharedHost, _: Client, chance: random.Random) -> bool:
    """A process is asked to end."""
    return _signal(shared, chance, signal.SIGTERM)


def _signal(shared: SharedHost, chance: random.Random, number: signal.Signals) -> bool:
    holders = shared.living("exec", "helper", "claim", "foreign")
    if not holders:
        return False
    os.kill(chance.choice(holders).process.pid, number)
    return True


def run(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """The coordinator runs a workload."""
    resources = Resources(gpu_count=chance.choice([1, 2]), cpu_millicores=10)
    _command(
        client,
        lambda: client.run(WorkloadSpec(arguments=shared.program, resources=resources), worker="alpha")[1],
    )
    return True


def stop(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """The coordinator stops somebody's workload."""
    found = _choose(shared, chance, RUNNING, SUSPENDED)
    if found is None:
        return False
    _command(client, lambda: client.stop(found.workload_id, grace_s=2))
    return True


def suspend(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """The coordinator parks somebody's workload."""
    found = _choose(shared, chance, RUNNING)
    if found is None:
        return False
    _command(client, lambda: client.suspend(found.workload_id))
    return True


def restore(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """The coordinator wakes somebody's workload."""
    found = _choose(shared, chance, SUSPENDED)
    if found is None:
        return False
    _command(client, lambda: client.restore(found.workload_id))
    return True


def remap(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """The coordinator moves somebody's workload to a free GPU."""
    free = [slot.gpu_uuid for slot in shared.look().gpus if slot.state == lease_pb2.SLOT_STATE_FREE]
    found = _choose(shared, chance, RUNNING)
    if found is None or not free or not found.status.lease.gpu_uuids:
        return False
    pair = (chance.choice(list(found.status.lease.gpu_uuids)), chance.choice(free))
    _command(client, lambda: client.remap({found.workload_id: [pair]}))
    return True


def adopt(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """Somebody's process is adopted."""
    foreign = shared.living("foreign")
    if not foreign:
        return False
    pid = chance.choice(foreign).process.pid
    _command(client, lambda: client.adopt(pid, worker="alpha")[1])
    return True


def release(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """An adopted process or a claim is let go, by the coordinator or on the host."""
    workloads = [
        workload
        for workload in shared.look().workloads
        if workload.origin in (workload_pb2.WORKLOAD_ORIGIN_ADOPT, workload_pb2.WORKLOAD_ORIGIN_CLAIM)
    ]
    if not workloads:
        return False
    workload_id = chance.choice(workloads).workload_id
    if chance.random() < 0.5:
        _command(client, lambda: client.release(workload_id))
    else:
        _tolerate(lambda: _release_locally(shared, workload_id))
    return True


def _release_locally(shared: SharedHost, workload_id: str) -> None:
    with LocalWorker(shared.socket) as worker:
        worker.release(workload_id)


def kill_worker(shared: SharedHost, _: Client, __: random.Random) -> bool:
    """The worker dies, and is started again."""
    shared.restart_worker(signal.SIGKILL)
    return True


def restart_worker(shared: SharedHost, _: Client, __: random.Random) -> bool:
    """The worker is restarted by its operator."""
    shared.restart_worker(signal.SIGTERM)
    return True


def sicken(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """A GPU gets an uncorrectable memory error, an Xid, or both."""
    if len(shared.sick) >= 2:
        return False
    slot = chance.choice(shared.look().gpus)
    signs = chance.choice(["count", "xid", "both"])
    if signs != "xid":
        shared.host.set_readings(slot.slot, ecc_uncorrected=1)
    if signs != "count":
        shared.host.raise_xid(slot.slot, 48)
    else:  # nothing tells of the count: the worker sees it at its next look, which a reset brings about
        _command(client, lambda: client.reset_gpu_health("alpha", [slot.gpu_uuid]))
    shared.sick.add(slot.gpu_uuid)
    return True


def cure(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """An operator has mended a GPU, and says so."""
    sick = [slot for slot in shared.look().gpus if slot.gpu_uuid in shared.sick]
    if not sick:
        return False
    slot = chance.choice(sick)
    shared.host.set_readings(slot.slot, ecc_uncorrected=0)
    if _command(client, lambda: client.reset_gpu_health("alpha", [slot.gpu_uuid])):
        shared.sick.remove(slot.gpu_uuid)
    return True


def cordon(shared: SharedHost, client: Client, chance: random.Random) -> bool:
    """An operator takes a GPU out of service, or puts all back."""
    if shared.cordoned:
        gpu_uuids = list(shared.cordoned)
        if _command(client, lambda: client.uncordon("alpha", gpu_uuids)):
            shared.cordoned.clear()
        return True
    gpu_uuid = chance.choice(shared.look().gpus).gpu_uuid
    if _command(client, lambda: client.cordon("alpha", [gpu_uuid], reason="chaos", cordoned_by="chaos")):
        shared.cordoned.add(gpu_uuid)
    return True


STEPS: Final[Sequence[tuple[Step, int]]] = (
    (start_exec, 16),
    (start_helper, 6),
    (start_claim, 8),
    (give_back, 6),
    (start_foreign, 5),
    (kill_holder, 12),
    (end_holder, 6),
    (run, 8),
    (stop, 6),
    (suspend, 6),
    (restore, 6),
    (remap, 4),
    (adopt, 5),
    (release, 3),
    (kill_worker, 3),
    (restart_worker, 2),
    (sicken, 2),
    (cure, 4),
    (cordon, 4),
)
"""Each with how often it is drawn, beside the others."""


def _choose(shared: SharedHost, chance: random.Random, *states: int) -> Workload | None:
    found = [workload for workload in _workloads(shared.look()) if workload.status.state in states]
    return chance.choice(found) if found else None


def _workloads(local: ListResponse) -> list[Workload]:
    return list(local.workloads)


def _command(client: Client, ask: Callable[[], Command]) -> bool:
    """Asks for a command and waits for its end; whether it succeeded. A refusal is an answer too."""
    ended: list[Command] = []

    def wait() -> None:
        command = ask()
        ended.append(client.wait(command, timeout_s=WAIT_S, check=False))

    _tolerate(wait)
    return any(command.state == command_pb2.COMMAND_STATE_SUCCEEDED for command in ended)


def _tolerate(call: Callable[[], object]) -> None:
    try:
        call()
    except LeaseholdError as error:
        if error.reason == "INTERNAL":
            raise
