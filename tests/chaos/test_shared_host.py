"""Everybody shares one host, at random: some steps here, a thousand by ``make shared N=1000``."""

import tempfile
from collections import Counter
from pathlib import Path

from .shared_host import shared_host
from .shared_runner import play

STEPS = 30
SEED = 5


def test_pool_ledger_nvml_and_coordinator_agree_after_every_step() -> None:
    # Not pytest's folder, which other users can't enter.
    with (
        tempfile.TemporaryDirectory(prefix="leasehold-shared-") as folder,
        shared_host(Path(folder)) as (shared, client),
    ):
        play(shared, client, STEPS, SEED, Counter())
