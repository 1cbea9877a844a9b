"""Eviction policies in words."""

from typing import Any

import pytest
from leasehold.v1 import command_pb2, eviction_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold_client.arguments.policies import PROCESSES, WEIGHTS, make_policy, parse_policy, policy_text
from leasehold_client.errors import UsageError

SUCCEEDED = command_pb2.COMMAND_STATE_SUCCEEDED
KEEP, CUDA, IMAGE, STOP = PROCESSES.values()
RETAIN, OFFLOAD, DISCARD = WEIGHTS.values()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("offload+cuda_suspend", (OFFLOAD, CUDA)),
        ("discard+keep_running", (DISCARD, KEEP)),
        ("offload", (OFFLOAD, CUDA)),
        ("retain", (RETAIN, CUDA)),
        ("stop", (RETAIN, STOP)),
        ("checkpoint", (RETAIN, IMAGE)),
    ],
)
def test_what_people_write(text: str, wanted: tuple[int, int]) -> None:
    policy = parse_policy(text)
    assert (policy.weight_strategy, policy.process_strategy, policy.escalate_to) == (*wanted, 0)
    assert parse_policy(policy_text(policy)) == policy


def test_the_words_are_those_of_the_wire() -> None:
    for words, kind, prefix in (
        (WEIGHTS, eviction_pb2.WeightStrategy, "WEIGHT_STRATEGY_"),
        (PROCESSES, eviction_pb2.ProcessStrategy, "PROCESS_STRATEGY_"),
    ):
        assert [prefix + word.upper() for word in words] == kind.keys()[1:]


@pytest.mark.parametrize(
    "text",
    ["", "+", "offload+", "+stop", "cuda_suspend+offload", "Offload", "cuda-suspend", "stop+stop+stop"],
)
def test_what_is_no_policy_names_the_words(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_policy(text)
    assert "retain, offload or discard" in error.value.message or (
        "keep_running, cuda_suspend, checkpoint or stop" in error.value.message
    )


def test_a_ladder_leads_upwards() -> None:
    assert make_policy(process="keep_running", escalate_to="stop").escalate_to == STOP
    assert parse_policy("offload", "cuda_suspend").escalate_to == CUDA
    with pytest.raises(UsageError, match=r"keep_running is weaker than cuda_suspend.*checkpoint or stop$"):
        parse_policy("offload", "keep_running")
    with pytest.raises(UsageError, match=r"checkpoint is weaker than stop.*write stop$"):
        make_policy(process="stop", escalate_to="checkpoint")


def test_what_people_read() -> None:
    newer: Any = 77
    for policy, text in (
        (EvictionPolicy(), "retain+cuda_suspend"),
        (EvictionPolicy(weight_strategy=DISCARD), "discard+cuda_suspend"),
        (EvictionPolicy(process_strategy=KEEP, escalate_to=STOP), "retain+keep_running, up to stop"),
        (EvictionPolicy(escalate_to=CUDA), "retain+cuda_suspend"),
        (EvictionPolicy(weight_strategy=newer, process_strategy=newer, escalate_to=newer), "77+77, up to 77"),
    ):
        assert policy_text(policy) == text
