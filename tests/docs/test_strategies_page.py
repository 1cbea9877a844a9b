"""docs/strategies.md says of every policy what the worker's table says."""

import re
from pathlib import Path

from leasehold.v1.errors_pb2 import ErrorReason
from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.plan_pb2 import Tier
from leasehold_worker.workloads.eviction import DEVICE, TABLE, policy_text
from leasehold_worker.workloads.states import PARKED_BY, state_text

PAGE = Path(__file__).resolve().parents[2] / "docs/strategies.md"
ROW = re.compile(r"^\| `(\w+\+\w+)` \| ([^|]*) \| ([^|]*) \| ([^|]*) \| (\w+) \| ([^|]*)\|$", re.M)


def test_the_table_on_the_page_is_that_of_the_worker() -> None:
    told = {
        row[1]: tuple(cell.strip() for cell in row.groups()[1:]) for row in ROW.finditer(PAGE.read_text())
    }
    expected = {}
    for (weights, process), strategy in TABLE.items():
        policy = EvictionPolicy(weight_strategy=weights, process_strategy=process)
        refusal = ErrorReason.Name(strategy.refusal).removeprefix("ERROR_REASON_")
        expected[policy_text(policy)] = (
            ", ".join(step.name.lower() for step in strategy.steps),
            "all" if DEVICE not in strategy.tiers else "nothing" if strategy.refusal else "weights",
            ", ".join(Tier.Name(tier).removeprefix("TIER_").lower() for tier in strategy.tiers),
            next(state_text(state) for state, by in PARKED_BY.items() if by == process),
            f"refused: {refusal}" if strategy.refusal else "",
        )
    assert told == expected
