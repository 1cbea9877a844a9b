"""Rules for claims of users who are neither root nor the worker's."""

import os

import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold_worker.errors import OperationError
from leasehold_worker.host.peers import Peer
from leasehold_worker.host.processes import ProcessIdentity, identify
from leasehold_worker.local_api.claim_rules import check_priority


def peer(uid: int) -> Peer:
    identity = identify(os.getpid())
    assert isinstance(identity, ProcessIdentity)
    return Peer(identity, uid, "somebody")


@pytest.mark.parametrize("uid", [0, os.geteuid()])
def test_root_and_the_user_of_the_worker_choose_any_priority(uid: int) -> None:
    check_priority(WorkloadSpec(priority=1000), peer(uid), 0)


def test_users_do_not_overtake_everybody() -> None:
    other = peer(os.geteuid() + 1)
    for priority, limit in ((0, 0), (-5, 0), (3, 3)):
        check_priority(WorkloadSpec(priority=priority), other, limit)
    check_priority(WorkloadSpec(), other, 0)
    with pytest.raises(OperationError, match="above 3") as raised:
        check_priority(WorkloadSpec(priority=4), other, 3)
    assert raised.value.reason == errors_pb2.ERROR_REASON_NOT_PERMITTED
