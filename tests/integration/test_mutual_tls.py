"""Stories of other modules, on fleets whose workers and user have certificates.

``LEASEHOLD_TEST_TRANSPORT=mutual-tls pytest tests/integration/test_plans.py`` plays all of another module so.
Stories fail there that open channels or start verbs of their own, with the tokens of this user.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.fleets import Fleet, make_fleet
from tests.integration.mutual_tls import why_not
from tests.integration.test_plans import (  # noqa: F401
    test_a_command_is_cancelled_while_its_members_are_being_locked,
    test_a_dry_run_tells_and_changes_nothing,
    test_two_workloads_swap_their_gpus,
)
from tests.integration.test_refusals import test_a_worker_out_of_contact  # noqa: F401
from tests.integration.test_verbs import (  # noqa: F401
    test_a_worker_that_leaves_and_comes_back,
    test_a_workload_goes_on_while_its_worker_is_dead,
    test_a_workload_of_several_gpus_moves_as_one,
    test_all_that_holds_gpus_of_a_worker_is_suspended_by_one_call,
    test_the_whole_way_by_hand,
)

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture
def empty_fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A coordinator without workers."""
    with make_fleet(tmp_path, is_mutual=True) as started:
        yield started


def test_the_caller_is_the_certificate(fleet: Fleet) -> None:
    assert fleet.cli("whoami").stdout == "user/tester: admin\n"
    fleet.run_counter("one")
    assert fleet.client.workload("one").owner == "user/tester"
    (worker,) = fleet.client.workers()
    assert worker.session_encrypted
    fleet.cli("stop", "one")
