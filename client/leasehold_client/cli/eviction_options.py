"""Options of the eviction policy, for ``suspend``, ``run``, ``exec`` and ``adopt``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

import click

from leasehold_client.arguments.policy_words import DEFAULT_PROCESS, DEFAULT_WEIGHTS, PROCESSES, WEIGHTS
from leasehold_client.cli.parameter_types import GivenPath, Number
from leasehold_client.errors import UsageError

if TYPE_CHECKING:
    from leasehold.v1.eviction_pb2 import EvictionPolicy
    from leasehold.v1.hook_pb2 import Hook

Value = TypeVar("Value")

CHECKPOINT_LIMIT: Final = 1000
"""Largest number of application checkpoints that a workload keeps."""

_ESCALATE_HELP: Final = (
    "Strongest process strategy that may replace PROCESS if PROCESS fails, if host memory is short, or if "
    "the suspended workload must free host memory.{more}  [default: PROCESS]"
)


@final
@dataclass(frozen=True, slots=True)
class Eviction:
    """Eviction settings of a new workload.

    Attributes:
        policy: Eviction policy. None: ``retain+cuda_suspend``.
        hooks: Hooks around suspend and restore.
        keep_checkpoints: Number of application checkpoints to keep. None: 3.
        checkpoint_id: Checkpoint that the application starts from. Empty: none.
    """

    policy: EvictionPolicy | None
    hooks: tuple[Hook, ...]
    keep_checkpoints: int | None = None
    checkpoint_id: str = ""


@final
class HooksType(GivenPath):
    """A click parameter type: a file of hooks, or the hooks themselves from a job file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Converts a path. A list of hooks stays."""
        return value if isinstance(value, list) else super().convert(value, param, ctx)


def policy_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a policy, as the argument ``policy``. None: no option was given."""

    @click.option(
        "--weights",
        type=click.Choice(WEIGHTS),
        help="What the framework does with the weights.  [default: as in the workload's policy, or retain "
        "if --process is given]",
    )
    @click.option(
        "--process",
        type=click.Choice(PROCESSES),
        help="What happens to the processes.  [default: as in the workload's policy, or cuda_suspend if "
        "--weights is given]",
    )
    @click.option(
        "--escalate-to",
        type=click.Choice(PROCESSES),
        help=_ESCALATE_HELP.format(more=" Needs --process or --weights."),
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
                "--escalate-to needs the strategy that it may replace: give --process or --weights too",
                click.get_current_context(),
            )
        function(*positional, policy=policy, **named)

    return call


def adoption_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a new workload's policy and hooks, as the argument ``eviction``."""

    @click.option(
        "--evict",
        metavar="WEIGHTS+PROCESS",
        help=f"Eviction policy: {'|'.join(WEIGHTS)}, and {'|'.join(PROCESSES)}.  "
        f"[default: {DEFAULT_WEIGHTS}+{DEFAULT_PROCESS}]",
    )
    @click.option("--escalate-to", type=click.Choice(PROCESSES), help=_ESCALATE_HELP.format(more=""))
    @click.option(
        "--hooks",
        "hooks_file",
        type=HooksType(path_type=Path),
        metavar="FILE",
        help="Hooks around suspend and restore: a JSON list of Hook messages of the protos.",
    )
    @wraps(function)
    def call(
        *positional: Any,
        evict: str | None,
        escalate_to: str | None,
        hooks_file: Path | list[object] | None,
        **named: Any,
    ) -> None:
        from leasehold_client.arguments.hooks_file import parse_hooks, read_hooks
        from leasehold_client.arguments.job_file import job_file_text
        from leasehold_client.arguments.policies import make_policy, parse_policy

        def read() -> Eviction:
            policy = None
            if evict is not None:
                policy = parse_policy(evict, escalate_to)
            elif escalate_to is not None:
                policy = make_policy(escalate_to=escalate_to)
            if isinstance(hooks_file, list):
                where = job_file_text(click.get_current_context().params["file"])
                return Eviction(policy, tuple(parse_hooks(hooks_file, where)))
            return Eviction(policy, tuple(read_hooks(hooks_file)) if hooks_file is not None else ())

        function(*positional, eviction=_usable(read), **named)

    return call


def eviction_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the eviction options of ``run``, as the argument ``eviction``."""

    @click.option(
        "--keep-checkpoints",
        type=Number(1, CHECKPOINT_LIMIT),
        metavar="N",
        help="Number of the newest application checkpoints to keep.  [default: 3]",
    )
    @click.option(
        "--from-checkpoint",
        "checkpoint_id",
        default="",
        metavar="ID",
        help="Checkpoint that the application starts from, on the worker that has it.  [default: none]",
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
    """Converts a UsageError to click's, since decorators run outside of the verb's own error handling."""
    try:
        return read()
    except UsageError as error:
        raise click.UsageError(error.message, click.get_current_context()) from error
