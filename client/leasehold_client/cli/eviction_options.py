"""The options that say how a workload gives up its GPUs: of ``suspend``, ``run``, ``exec`` and ``adopt``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import click

from leasehold_client.arguments.policy_words import DEFAULT_PROCESS, DEFAULT_WEIGHTS, PROCESSES, WEIGHTS
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold.v1.workload_pb2 import EvictionPolicy, Hook

Value = TypeVar("Value")

CHECKPOINT_LIMIT: Final = 1000
"""Checkpoints of its application that a workload may keep."""

_ESCALATE_HELP: Final = (
    "The strongest process strategy that may be used where the one that is asked for fails, where host "
    "memory is short, and where the parked workload must make room.{more}  [default: no other]"
)


@final
@dataclass(frozen=True, slots=True)
class Eviction:
    """How a new workload gives up its GPUs.

    Attributes:
        policy: Its policy. None: weights retained, CUDA suspend.
        hooks: What is called on the way down and up.
        keep_checkpoints: How many checkpoints of its application are kept. None: 3.
        checkpoint_id: The one that it begins with; empty for none.
    """

    policy: EvictionPolicy | None
    hooks: tuple[Hook, ...]
    keep_checkpoints: int | None = None
    checkpoint_id: str = ""


def policy_options(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a verb the two axes of a policy, as its argument ``policy``; None: none was said."""

    @click.option(
        "--weights",
        type=click.Choice(WEIGHTS),
        help="What its framework does with the weights first.  [default: as it was started with, or retain "
        "if --process is given]",
    )
    @click.option(
        "--process",
        type=click.Choice(PROCESSES),
        help="What then happens to its processes.  [default: as it was started with, or cuda_suspend if "
        "--weights is given]",
    )
    @click.option(
        "--escalate-to",
        type=click.Choice(PROCESSES),
        help=_ESCALATE_HELP.format(more=" Give --process or --weights too."),
    )
    @wraps(function)
    def call(
        *positional: Any, weights: str | None, process: str | None, escalate_to: str | None, **named: Any
    ) -> None:
        from leasehold_client.arguments.policies import make_policy

        policy = None
        if weights is not None or process is not None:
            policy = _usable(
                lambda: make_policy(weights or DEFAULT_WEIGHTS, process or DEFAULT_PROCESS, escalate_to)
            )
        elif escalate_to is not None:
            raise click.UsageError(
                "--escalate-to is the end of a ladder whose beginning is not said: give --process or "
                "--weights too",
                click.get_current_context(),
            )
        function(*positional, policy=policy, **named)

    return call


def adoption_options(function: Callable[..., None]) -> Callable[..., None]:
    """Gives a verb for programs that no worker starts the argument ``eviction``: an :class:`Eviction`."""

    @click.option(
        "--evict",
        metavar="WEIGHTS+PROCESS",
        help=f"How it gives up its GPUs: {'|'.join(WEIGHTS)}, and {'|'.join(PROCESSES)}.  "
        f"[default: {DEFAULT_WEIGHTS}+{DEFAULT_PROCESS}]",
    )
    @click.option("--escalate-to", type=click.Choice(PROCESSES), help=_ESCALATE_HELP.format(more=""))
    @click.option(
        "--hooks",
        "hooks_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="JSON list of what to call around that: messages Hook of the protos.",
    )
    @wraps(function)
    def call(
        *positional: Any, evict: str | None, escalate_to: str | None, hooks_file: Path | None, **named: Any
    ) -> None:
        from leasehold_client.arguments.hooks_file import read_hooks
        from leasehold_client.arguments.policies import make_policy, parse_policy

        def read() -> Eviction:
            policy = None
            if evict is not None:
                policy = parse_policy(evict, escalate_to)
            elif escalate_to is not None:
                policy = make_policy(escalate_to=escalate_to)
            return Eviction(policy, tuple(read_hooks(hooks_file)) if hooks_file is not None else ())

        function(*positional, eviction=_usable(read), **named)

    return call


def eviction_options(function: Callable[..., None]) -> Callable[..., None]:
    """Gives ``run`` its options of giving GPUs up, as its argument ``eviction``: an :class:`Eviction`."""

    @click.option(
        "--keep-checkpoints",
        type=click.IntRange(1, CHECKPOINT_LIMIT),
        metavar="N",
        help="How many checkpoints of its application are kept, the newest ones.  [default: 3]",
    )
    @click.option(
        "--from-checkpoint",
        "checkpoint_id",
        default="",
        metavar="ID",
        help="Checkpoint that its application begins with, on the worker that has it.  [default: none]",
    )
    @adoption_options
    @wraps(function)
    def call(
        *positional: Any,
        eviction: Eviction,
        keep_checkpoints: int | None,
        checkpoint_id: str,
        **named: Any,
    ) -> None:
        whole = replace(eviction, keep_checkpoints=keep_checkpoints, checkpoint_id=checkpoint_id)
        function(*positional, eviction=whole, **named)

    return call


def _usable(read: Callable[[], Value]) -> Value:
    """What options say. What they can't say is refused in click's way: these run outside of the verb."""
    try:
        return read()
    except UsageError as error:
        raise click.UsageError(error.message, click.get_current_context()) from error
