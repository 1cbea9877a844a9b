"""Eviction policies as text, such as ``offload+cuda_suspend``. Pure."""

from collections.abc import Iterable
from typing import Final, TypeVar

from leasehold.v1.eviction_pb2 import EvictionPolicy, ProcessStrategy, WeightStrategy

from leasehold_client.arguments import policy_words
from leasehold_client.arguments.policy_words import DEFAULT_PROCESS, DEFAULT_WEIGHTS
from leasehold_client.errors import UsageError

Strategy = TypeVar("Strategy", bound=int)

WEIGHTS: Final = {
    word: WeightStrategy.Value(f"WEIGHT_STRATEGY_{word.upper()}") for word in policy_words.WEIGHTS
}
PROCESSES: Final = {
    word: ProcessStrategy.Value(f"PROCESS_STRATEGY_{word.upper()}") for word in policy_words.PROCESSES
}


def make_policy(
    weights: str = DEFAULT_WEIGHTS, process: str = DEFAULT_PROCESS, escalate_to: str | None = None
) -> EvictionPolicy:
    """Builds a policy from words.

    Args:
        weights: The weight strategy.
        process: The process strategy.
        escalate_to: The strongest process strategy that may replace ``process``. None: ``process`` itself.

    Raises:
        UsageError: A word is unknown, or ``escalate_to`` is weaker than ``process``.
    """
    policy = EvictionPolicy(
        weight_strategy=_find(weights, WEIGHTS, "weight strategy"),
        process_strategy=_find(process, PROCESSES, "process strategy"),
    )
    if escalate_to is not None:
        policy.escalate_to = _find(escalate_to, PROCESSES, "process strategy")
        ladder = list(PROCESSES)
        stronger = ladder[ladder.index(process) :]
        if escalate_to not in stronger:
            raise UsageError(
                f"{escalate_to} is weaker than {process}, and escalation needs a stronger strategy: "
                f"write {_listed(stronger)}"
            )
    return policy


def parse_policy(text: str, escalate_to: str | None = None) -> EvictionPolicy:
    """Parses WEIGHTS+PROCESS. A part that is missing has its default.

    Raises:
        UsageError: A word is unknown, or ``escalate_to`` is weaker than the process strategy.
    """
    first, plus, second = text.partition("+")
    if plus:
        return make_policy(first, second, escalate_to)
    if first in WEIGHTS:
        return make_policy(weights=first, escalate_to=escalate_to)
    if first in PROCESSES:
        return make_policy(process=first, escalate_to=escalate_to)
    raise UsageError(
        f"{text!r} is not an eviction policy: write WEIGHTS+PROCESS, WEIGHTS or PROCESS, where WEIGHTS is "
        f"{_listed(WEIGHTS)}, and PROCESS is {_listed(PROCESSES)}"
    )


def policy_text(policy: EvictionPolicy) -> str:
    """Formats a policy. A part that is missing is shown with its default."""
    weights = _word(policy.weight_strategy, WEIGHTS, DEFAULT_WEIGHTS)
    process = _word(policy.process_strategy, PROCESSES, DEFAULT_PROCESS)
    if not policy.escalate_to or policy.escalate_to == PROCESSES.get(process):
        return f"{weights}+{process}"
    return f"{weights}+{process}, up to {_word(policy.escalate_to, PROCESSES, '')}"


def _find(word: str, words: dict[str, Strategy], what: str) -> Strategy:
    if word not in words:
        raise UsageError(f"{word!r} is not a {what}: write {_listed(words)}")
    return words[word]


def _word(strategy: Strategy, words: dict[str, Strategy], default: str) -> str:
    """The word of a strategy. A strategy of a newer coordinator is its number."""
    if not strategy:
        return default
    return next((word for word, known in words.items() if known == strategy), str(strategy))


def _listed(words: Iterable[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last
