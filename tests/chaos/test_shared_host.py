"""Everybody shares one host, at random: some steps here, a thousand by ``make shared N=1000``."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests.environment import seed

from .shared_host import shared_host
from .shared_runner import play

STEPS = 10
SEED = 5
LONG_STEPS = 200


def play_alone(steps: int, number: int) -> None:
    # Not pytest's folder, which other users can't enter.
    with (
        tempfile.TemporaryDirectory(prefix="leasehold-shared-") as folder,
        shared_host(Path(folder)) as (shared, client),
    ):
        play(shared, client, steps, number, Counter())


@pytest.mark.long
def test_pool_ledger_nvml_and_coordinator_agree_after_every_step() -> None:
    play_alone(STEPS, SEED)


@pytest.mark.long
@pytest.mark.minutes
def test_pool_ledger_nvml_and_coordinator_agree_after_every_step_of_the_day() -> None:
    play_alone(LONG_STEPS, seed())
