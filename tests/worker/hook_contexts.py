"""Contexts of hooks, for tests of hooks."""

import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

import trio
from leasehold.v1 import errors_pb2, eviction_pb2, hook_pb2
from leasehold.v1.eviction_pb2 import WeightStrategy
from leasehold.v1.hook_pb2 import Hook
from leasehold_worker.errors import OperationError
from leasehold_worker.hooks.context import HookContext, HookRecord, KernelSide
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity, identify

RETAIN = eviction_pb2.WEIGHT_STRATEGY_RETAIN
OFFLOAD = eviction_pb2.WEIGHT_STRATEGY_OFFLOAD
DISCARD = eviction_pb2.WEIGHT_STRATEGY_DISCARD
BEFORE = hook_pb2.HOOK_PHASE_BEFORE_SUSPEND
AFTER = hook_pb2.HOOK_PHASE_AFTER_RESTORE
READINESS = hook_pb2.HOOK_PHASE_READINESS


def this_process() -> ProcessIdentity:
    identity = identify(os.getpid())
    assert identity is not None
    return identity


async def unknown() -> int | None:
    return None


async def unserved(timeout_s: float) -> NoReturn:
    await trio.sleep(timeout_s)
    raise OperationError(errors_pb2.ERROR_REASON_KERNEL_NOT_READY, "nobody serves")


def context(
    hooks: Sequence[Hook],
    directory: Path,
    strategy: WeightStrategy.ValueType = RETAIN,
    *,
    root: ProcessIdentity | None = None,
    measure: Callable[[], Awaitable[int | None]] = unknown,
    kernel: KernelSide | None = None,
    wait_kernel: Callable[[float], Awaitable[KernelSide]] = unserved,
    record: HookRecord | None = None,
) -> HookContext:
    return HookContext(
        workload_id="w-1",
        workload_name="llm",
        root=root or this_process(),
        hooks=hooks,
        policy=eviction_pb2.EvictionPolicy(
            weight_strategy=strategy, process_strategy=eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND
        ),
        member_pids=[Pid(41), Pid(42)],
        environment={"PATH": os.environ["PATH"], "LEASEHOLD_WORKLOAD_ID": "w-1"},
        working_directory=directory,
        measure=measure,
        wait_kernel=wait_kernel,
        kernel=kernel,
        record=record or HookRecord(),
    )


def http_hook(
    name: str,
    url: str,
    phase: hook_pb2.HookPhase.ValueType = BEFORE,
    method: str = "POST",
    body: str = "",
) -> Hook:
    return Hook(
        name=name,
        phase=phase,
        http=hook_pb2.HttpHook(method=method, url=url, body=body.encode()),
    )
