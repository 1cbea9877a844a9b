"""Readiness probes among the hooks of a spec."""

from collections.abc import Iterable

from leasehold.v1 import hook_pb2


def is_probe(hook: hook_pb2.Hook) -> bool:
    """Whether a hook is a readiness probe, which takes no part in a suspend or restore."""
    return hook.phase == hook_pb2.HOOK_PHASE_READINESS


def probes(hooks: Iterable[hook_pb2.Hook]) -> list[hook_pb2.Hook]:
    """The readiness probes among hooks, in their order."""
    return [hook for hook in hooks if is_probe(hook)]
