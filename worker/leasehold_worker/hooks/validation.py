"""Validation of hooks before they are used, and the choice of those for weights. Pure."""

import ipaddress
import re
import signal
from collections.abc import Sequence
from typing import Final

from leasehold.v1 import errors_pb2, eviction_pb2, hook_pb2
from leasehold.v1.eviction_pb2 import WeightStrategy

from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.hooks import templates
from leasehold_worker.hooks.context import claims_memory, concerns, goes_down, is_two_way, kind, timeout_s
from leasehold_worker.hooks.http_call import check_url
from leasehold_worker.workloads.probes import is_probe

MOST_HOOKS: Final = 32
"""Hooks of a workload: each may take its timeout, one after the other."""

LONGEST_TIMEOUT_S: Final = 3600.0
"""Longest timeout of one hook."""

_VARIABLE: Final = r"[A-Za-z_][A-Za-z0-9_]{0,127}"
_METHODS: Final = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD"})
_PHASES: Final = frozenset(
    {
        hook_pb2.HOOK_PHASE_BEFORE_SUSPEND,
        hook_pb2.HOOK_PHASE_AFTER_RESTORE,
        hook_pb2.HOOK_PHASE_READINESS,
    }
)
_PROBES: Final = frozenset({"command", "http"})
"""Actions that return an answer, and so can be readiness probes."""


def check_hooks(hooks: Sequence[hook_pb2.Hook], path: str = "hooks") -> None:
    """Refuses hooks that can't be called.

    Args:
        hooks: The hooks.
        path: Path of the hooks in the request.

    Raises:
        OperationError: INVALID_ARGUMENT; metadata "field" names the field, such as ``hooks[0].timeout``.
    """
    if len(hooks) > MOST_HOOKS:
        raise invalid(path, f"{len(hooks)} hooks exceed the limit of {MOST_HOOKS}: combine some")
    names: set[str] = set()
    for index, hook in enumerate(hooks):
        field = f"{path}[{index}]"
        if not hook.name.strip() or not hook.name.isprintable() or "/" in hook.name:
            raise invalid(f"{field}.name", f"hook {index} needs a name without slashes: give it one")
        if hook.name in names:
            raise invalid(f"{field}.name", f"two hooks have the name {hook.name}: give each its own")
        names.add(hook.name)
        _check_hook(field, hook)


def check_foreign_hooks(hooks: Sequence[hook_pb2.Hook]) -> None:
    """Refuses hooks that would do as the worker's user something that the calling user may not.

    A command runs as the worker's user. A request may go to any address, and a credential may be any user's
    file. The other hooks do nothing that the caller could not do.

    Raises:
        OperationError: NOT_PERMITTED; metadata "field" names the field.
    """
    for index, hook in enumerate(hooks):
        field = f"hooks[{index}]"
        server: hook_pb2.VllmHook | hook_pb2.SglangHook | None = None
        match kind(hook):
            case "vllm":
                server = hook.vllm
            case "sglang":
                server = hook.sglang
            case "kernel" | "signal":
                pass
            case other:
                raise _not_permitted(f"{field}.{other}", hook.name, f"{other} hooks")
        if hook.HasField("drain"):
            raise _not_permitted(f"{field}.drain", hook.name, "drains")
        if server is not None and server.HasField("credential"):
            raise _not_permitted(f"{field}.{kind(hook)}.credential", hook.name, "credentials")
        if server is not None and not _is_of_this_host(server.url):
            raise _not_permitted(f"{field}.{kind(hook)}.url", hook.name, "servers beyond 127.0.0.1 or [::1]")


def _is_of_this_host(url: str) -> bool:
    try:
        return ipaddress.ip_address(check_url(url).hostname or "").is_loopback
    except ValueError:  # a host name may resolve to any address
        return False


def _not_permitted(field: str, name: str, what: str) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_NOT_PERMITTED,
        f"hook {name}: {what} are allowed only for root and the worker's own user, since the "
        "worker runs them as its own user: use vllm or sglang of this host, kernel or signal, or "
        "have an administrator adopt the process",
        {"field": field},
    )


def weights_hooks(
    hooks: Sequence[hook_pb2.Hook], weight_strategy: WeightStrategy.ValueType
) -> list[hook_pb2.Hook]:
    """The hooks that move or drop the weights by a strategy, in order. None if weights are retained."""
    if weight_strategy not in (eviction_pb2.WEIGHT_STRATEGY_OFFLOAD, eviction_pb2.WEIGHT_STRATEGY_DISCARD):
        return []
    return [
        hook for hook in hooks if concerns(hook, weight_strategy) and claims_memory(hook, weight_strategy)
    ]


def _check_hook(field: str, hook: hook_pb2.Hook) -> None:
    name = hook.name
    if not kind(hook):
        raise invalid(
            f"{field}.action",
            f"hook {name} has no action: give it command, http, signal, vllm, sglang or kernel",
        )
    if is_two_way(hook) and hook.phase:
        raise invalid(f"{field}.phase", f"hook {name} ({kind(hook)}) has no phase of its own: leave it out")
    if not is_two_way(hook) and hook.phase not in _PHASES:
        raise invalid(
            f"{field}.phase",
            f"hook {name} has no phase: give it HOOK_PHASE_BEFORE_SUSPEND, HOOK_PHASE_AFTER_RESTORE or "
            "HOOK_PHASE_READINESS",
        )
    if is_probe(hook) and kind(hook) not in _PROBES:
        raise invalid(
            f"{field}.phase",
            f"hook {name} ({kind(hook)}) can't be a readiness probe: give it command or http",
        )
    if is_probe(hook) and hook.weight_strategies:
        raise invalid(
            f"{field}.weight_strategies",
            f"hook {name} is a readiness probe, which has no weight strategies: leave them out",
        )
    if not 0 < timeout_s(hook) <= LONGEST_TIMEOUT_S:
        raise invalid(
            f"{field}.timeout",
            f"hook {name} has a timeout of {timeout_s(hook):g} s: give it more than 0 s and at most "
            f"{LONGEST_TIMEOUT_S:g} s",
        )
    for strategy in hook.weight_strategies:
        if strategy not in WeightStrategy.values() or not strategy:
            raise invalid(
                f"{field}.weight_strategies", f"hook {name} names an unknown weight strategy ({strategy})"
            )
    if hook.frees_memory and not goes_down(hook):
        raise invalid(
            f"{field}.frees_memory", f"hook {name} is not called before a suspend, and can't free memory then"
        )
    _check_action(field, hook)
    if hook.HasField("drain"):
        _check_drain(f"{field}.drain", hook)


def _check_action(field: str, hook: hook_pb2.Hook) -> None:
    match kind(hook):
        case "command":
            _check_command(f"{field}.command", hook)
        case "http":
            _check_http(f"{field}.http", hook.name, hook.http)
        case "signal":
            if hook.signal.signal_number not in signal.valid_signals() or hook.signal.signal_number in (
                signal.SIGKILL,
                signal.SIGSTOP,
            ):
                raise invalid(
                    f"{field}.signal.signal_number",
                    f"hook {hook.name} sends signal {hook.signal.signal_number}: give the number of "
                    "one that a program can handle",
                )
        case "vllm":
            _check_url(f"{field}.vllm.url", hook.name, hook.vllm.url, base=True)
            if bool(hook.vllm.suspend_method) != bool(hook.vllm.resume_method):
                raise invalid(
                    f"{field}.vllm.suspend_method",
                    f"hook {hook.name} has one of suspend_method and resume_method: give both, or none",
                )
            _check_tags(f"{field}.vllm.wake_tags", hook.name, hook.vllm.wake_tags)
            if hook.vllm.HasField("credential"):
                _check_credential(f"{field}.vllm.credential", hook.name, hook.vllm.credential)
        case "sglang":
            _check_url(f"{field}.sglang.url", hook.name, hook.sglang.url, base=True)
            _check_tags(f"{field}.sglang.tags", hook.name, hook.sglang.tags)
            if hook.sglang.HasField("credential"):
                _check_credential(f"{field}.sglang.credential", hook.name, hook.sglang.credential)


def _check_command(field: str, hook: hook_pb2.Hook) -> None:
    arguments = hook.command.arguments
    if not arguments or not arguments[0]:
        raise invalid(f"{field}.arguments", f"hook {hook.name} has no program: give it one")
    for argument in arguments:
        if "\0" in argument:
            raise invalid(f"{field}.arguments", f"hook {hook.name} has an argument with a zero byte")
        _check_template(f"{field}.arguments", hook.name, argument)


def _check_http(field: str, name: str, request: hook_pb2.HttpHook) -> None:
    if request.method not in _METHODS:
        raise invalid(
            f"{field}.method",
            f"hook {name} has the method {request.method!r}: give one of {', '.join(sorted(_METHODS))}",
        )
    _check_url(f"{field}.url", name, request.url, base=False)
    if request.HasField("credential"):
        _check_credential(f"{field}.credential", name, request.credential)
    try:
        body = request.body.decode()
    except UnicodeDecodeError as error:
        raise invalid(
            f"{field}.body", f"hook {name} has a body that is not UTF-8, and no template"
        ) from error
    _check_template(f"{field}.body", name, body)


def _check_drain(field: str, hook: hook_pb2.Hook) -> None:
    drain = hook.drain
    if not goes_down(hook):
        raise invalid(field, f"hook {hook.name} is not called before a suspend: leave drain out")
    if not drain.HasField("idle"):
        raise invalid(
            f"{field}.idle",
            f"hook {hook.name} drains without a check for the end: give idle",
        )
    if drain.HasField("stop_admitting") != drain.HasField("admit_again"):
        raise invalid(
            f"{field}.admit_again",
            f"hook {hook.name} has one of stop_admitting and admit_again: give both, or none",
        )
    for part in ("stop_admitting", "idle", "admit_again"):
        if drain.HasField(part):
            _check_http(f"{field}.{part}", hook.name, getattr(drain, part))


def _check_url(field: str, name: str, url: str, *, base: bool) -> None:
    try:
        parts = check_url(url if base else templates.expand(url, dict.fromkeys(templates.NAMES, "x")))
    except ValueError as error:
        raise invalid(field, f"hook {name} has the address {url!r}: {error}") from error
    if base and (parts.path not in ("", "/") or parts.query):
        raise invalid(
            field, f"hook {name} has the address {url!r}: give the server's, such as http://127.0.0.1:8000"
        )


def _check_credential(field: str, name: str, credential: hook_pb2.HookCredential) -> None:
    match credential.WhichOneof("source"):
        case "file" if not credential.file.startswith("/") or "\0" in credential.file:
            raise invalid(
                f"{field}.file",
                f"hook {name} has a relative path of its credential: give an absolute one",
            )
        case "environment_variable" if not re.fullmatch(_VARIABLE, credential.environment_variable):
            raise invalid(
                f"{field}.environment_variable",
                f"hook {name} has a credential in an invalid variable name: use letters, digits and '_'",
            )
        case None:
            raise invalid(field, f"hook {name} has a credential without a source: give a file or a variable")


def _check_tags(field: str, name: str, tags: Sequence[str]) -> None:
    for tag in tags:
        if not tag.replace("_", "").isalnum() or not tag.isascii():
            raise invalid(field, f"hook {name} has the tag {tag!r}: give one such as weights or kv_cache")
    if len(set(tags)) != len(tags):
        raise invalid(field, f"hook {name} names a tag twice: name each once")


def _check_template(field: str, name: str, text: str) -> None:
    try:
        templates.check(text)
    except ValueError as error:
        raise invalid(field, f"hook {name} has the text {text[:80]!r}: {error}") from error
