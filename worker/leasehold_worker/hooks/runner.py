"""Calls the hooks of a workload before a suspend, after a restore, and in a rollback.

Before a suspend, in their order: hooks with both directions, and those of BEFORE_SUSPEND. A hook with a drain
drains first.

After a restore or in a rollback, in this order:

1. hooks with both directions, in reverse;
2. hooks of AFTER_RESTORE, in their order;
3. servers whose admission was stopped admit again, in reverse: no request enters before all is ready. A
   server whose own hook failed stays closed.

Hooks for other weight strategies than the policy's are skipped, in both directions.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio
from leasehold.v1 import errors_pb2, hook_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.hooks import command_hook, freed_memory, http_hook, sglang_hook, signal_hook, vllm_hook
from leasehold_worker.hooks.context import (
    HookContext,
    HookFailedError,
    Phase,
    Turn,
    claims_memory,
    concerns,
    goes_down,
    is_two_way,
    kind,
    timeout_s,
)
from leasehold_worker.workloads.probes import probes

logger = logging.getLogger(__name__)

RECONNECT_TIMEOUT_S: Final = 30.0
"""Time for an application to register again after a restart of the worker. It tries each 5 s at most."""

_WAYS: Final = {
    Phase.BEFORE_SUSPEND: "before the suspend",
    Phase.AFTER_RESTORE: "after the restore",
    Phase.ROLLBACK: "during the rollback",
    Phase.READINESS: "as a readiness probe",
}


async def down(context: HookContext) -> None:
    """Calls the hooks before a suspend.

    A drain has the hook's timeout, and its action has it again. After a failure or a cancellation all begun
    hooks are rolled back, shielded from cancellation, each within its timeout. Failures of the rollback
    become warnings of the context.

    Raises:
        OperationError: HOOK_FAILED, or the error of the application; MEMORY_NOT_FREED. Metadata "hook" names
            the hook. Or the record could not be stored.
    """
    finished = False
    context.record.begin()
    try:
        for hook in context.hooks:
            if goes_down(hook) and concerns(hook, context.weight_strategy):
                await context.record.add(hook.name)
                await _go_down(Turn(hook, context, Phase.BEFORE_SUSPEND, warnings=context.warnings))
        finished = True
    finally:
        if not finished:
            begun = _begun(context)
            failures = await _go_back(context, begun, Phase.ROLLBACK) if begun else []
            context.warnings.extend(failure.message for failure in failures)


async def up(context: HookContext) -> list[str]:
    """Calls all hooks after a restore, past failures and shielded from cancellation.

    Returns:
        Failures that are not fatal, which are warnings of the context, too.

    Raises:
        OperationError: HOOK_FAILED: the first failure. Others are warnings of the context.
    """
    told = len(context.warnings)
    failures = await _go_back(context, _downward(context), Phase.AFTER_RESTORE)
    if failures:
        context.warnings.extend(failure.message for failure in failures[1:])
        raise failures[0]
    return context.warnings[told:]


async def down_again(context: HookContext) -> list[str]:
    """Calls the hooks before a suspend again after a failed restore, shielded from cancellation.

    A failure is not rolled back, and memory need not fall: a server that never woke has none to free.

    Returns:
        Failures, which are warnings of the context, too.
    """
    failures: list[str] = []
    with trio.CancelScope(shield=True):
        for hook in _downward(context):
            turn = Turn(hook, context, Phase.BEFORE_SUSPEND, warnings=context.warnings)
            try:
                await context.record.add(hook.name)
                if hook.HasField("drain"):
                    await _limited(turn, http_hook.drain)
                await _limited(turn, _act_down)
            except OperationError as error:
                failures.append(f"and then, when it was called again before the suspend: {error.message}")
    context.warnings.extend(failures)
    return failures


async def roll_back(context: HookContext) -> list[str]:
    """Undoes the hooks before a suspend, as far as the record goes, shielded from cancellation.

    It may be called again, and after a restart of the worker. Without a record it undoes all hooks whose
    server can be queried: vLLM can; SGLang can't, and is only told to admit requests again.

    Returns:
        Failures, which are warnings of the context, too.
    """
    told = len(context.warnings)
    failures = await _go_back(context, _begun(context), Phase.ROLLBACK)
    context.warnings.extend(failure.message for failure in failures)
    return context.warnings[told:]


async def probe(context: HookContext) -> None:
    """Calls each readiness probe once, in their order, until one fails.

    Raises:
        OperationError: HOOK_FAILED: the application is not ready.
    """
    for hook in probes(context.hooks):
        await _limited(Turn(hook, context, Phase.READINESS, warnings=context.warnings), _act_once)


def _downward(context: HookContext) -> list[hook_pb2.Hook]:
    return [hook for hook in context.hooks if goes_down(hook) and concerns(hook, context.weight_strategy)]


def _upward(context: HookContext) -> list[hook_pb2.Hook]:
    after = hook_pb2.HOOK_PHASE_AFTER_RESTORE
    return [hook for hook in context.hooks if hook.phase == after and concerns(hook, context.weight_strategy)]


def _begun(context: HookContext) -> list[hook_pb2.Hook]:
    return [hook for hook in _downward(context) if context.record.holds(hook.name)]


async def _go_down(turn: Turn) -> None:
    if turn.hook.HasField("drain"):
        await _limited(turn, http_hook.drain)
    if not claims_memory(turn.hook, turn.context.weight_strategy):
        await _limited(turn, _act_down)
        return
    before = await turn.context.measure()
    await _limited(turn, _act_down)
    await freed_memory.require_freed(turn, before)


async def _go_back(
    context: HookContext, begun: Sequence[hook_pb2.Hook], phase: Phase
) -> list[OperationError]:
    """Undoes all hooks, past failures."""
    failures: list[OperationError] = []
    broken: set[str] = set()
    upward = _upward(context)

    async def go(hook: hook_pb2.Hook, action: Callable[[Turn], Awaitable[None]]) -> None:
        try:
            await _limited(Turn(hook, context, phase, warnings=context.warnings), action)
        except OperationError as error:
            failures.append(error)
            broken.add(hook.name)
        except Exception as error:  # the other hooks are still rolled back
            logger.error("hook %s of workload %s", hook.name, context.workload_name, exc_info=error)
            text = (
                f"hook {hook.name} {_WAYS[phase]} failed because of a defect ({error!r}): see the "
                "worker's log"
            )
            metadata = {"hook": hook.name}
            failures.append(OperationError(errors_pb2.ERROR_REASON_INTERNAL, text, metadata))
            broken.add(hook.name)

    with trio.CancelScope(shield=True):
        for hook in reversed(begun):
            if is_two_way(hook):
                await go(hook, _act_up)
        for hook in upward:
            await go(hook, _act_once)
        for hook in reversed(begun):
            if hook.HasField("drain") and hook.name not in broken:
                await go(hook, http_hook.admit_again)
        # A note that stays tells that the rollback is incomplete, so the failed ones are noted first.
        for hook in (*upward, *begun):
            if hook.name not in broken:
                await go(hook, _forget)
            elif hook in upward:
                await go(hook, _note)
    return failures


async def _limited(turn: Turn, action: Callable[[Turn], Awaitable[None]]) -> None:
    """Performs one action of a hook within its timeout.

    Raises:
        OperationError: The action failed, or was not done in time.
    """
    limit_s = timeout_s(turn.hook)
    try:
        with trio.fail_after(limit_s):
            await action(turn)
    except trio.TooSlowError as error:
        text = (
            f"timed out after {limit_s:g} s ({turn.doing}): check the reason of the delay, or "
            "give a longer timeout"
        )
        raise _failed(turn, text) from error
    except (HookFailedError, ValueError) as error:  # an unchecked hook may have an invalid template
        raise _failed(turn, f"failed: {error}") from error
    except OperationError as error:
        raise OperationError(
            error.reason,
            f"hook {turn.hook.name}: {error.message}",
            {**error.metadata, "hook": turn.hook.name},
        ) from error


def _failed(turn: Turn, text: str) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_HOOK_FAILED,
        f"hook {turn.hook.name} ({kind(turn.hook)}) {_WAYS[turn.phase]} {text}",
        {"hook": turn.hook.name, "phase": str(turn.phase)},
    )


async def _act_down(turn: Turn) -> None:
    match kind(turn.hook):
        case "vllm":
            await vllm_hook.down(turn)
        case "sglang":
            await sglang_hook.down(turn)
        case "kernel":
            if turn.context.kernel is None:
                raise HookFailedError(
                    "the application is not checkpointable: have it call "
                    "leasehold_client.kernel.serve, or leave the hook out"
                )
            turn.doing = "the application was preparing"
            await turn.context.kernel.prepare(timeout_s(turn.hook))
        case _:
            await _act_once(turn)


async def _act_up(turn: Turn) -> None:
    match kind(turn.hook):
        case "vllm":
            await vllm_hook.up(turn)
        case "sglang":
            await sglang_hook.up(turn)
        case "kernel":
            kernel = turn.context.kernel
            if kernel is None and turn.phase is Phase.AFTER_RESTORE:
                turn.doing = "the application had not registered again: see its output"
                kernel = await turn.context.wait_kernel(min(RECONNECT_TIMEOUT_S, timeout_s(turn.hook)))
            if kernel is not None:
                turn.doing = "the application was resuming"
                await kernel.cancel(timeout_s(turn.hook))


async def _act_once(turn: Turn) -> None:
    match kind(turn.hook):
        case "http":
            await http_hook.run(turn)
        case "command":
            await command_hook.run(turn)
        case "signal":
            signal_hook.send(turn)
        case other:
            raise HookFailedError(f"unsupported action ({other or 'no action'})")


async def _note(turn: Turn) -> None:
    await turn.context.record.add(turn.hook.name)


async def _forget(turn: Turn) -> None:
    await turn.context.record.remove(turn.hook.name)
