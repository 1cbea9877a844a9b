"""``leasehold get audit`` and ``leasehold audit verify``."""

import json

from leasehold.v1 import audit_service_pb2, errors_pb2
from leasehold.v1.audit_pb2 import AUDIT_OUTCOME_ALLOWED, AUDIT_OUTCOME_REFUSED, AuditEntry

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator

STOP = "/leasehold.v1.WorkloadService/StopWorkload"


def test_entries_as_a_table_of_one_identity(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    asked: list[str] = []

    def answer(request: audit_service_pb2.ListAuditEntriesRequest, context: object) -> object:
        asked.append(request.filter)
        allowed = AuditEntry(
            number=2, identity="service/batch", on_behalf_of="user/alice", method=STOP, count=1
        )
        allowed.outcome, allowed.resource = AUDIT_OUTCOME_ALLOWED, "workload/w-1"
        reason = errors_pb2.ERROR_REASON_UNAUTHENTICATED
        refused = AuditEntry(number=1, outcome=AUDIT_OUTCOME_REFUSED, reason=reason, count=70)
        return audit_service_pb2.ListAuditEntriesResponse(entries=[allowed, refused])

    scripted.answers["ListAuditEntries"] = answer
    done = leasehold("get", "audit")
    assert (done.code, done.stderr) == (0, "")
    _, first, second = done.stdout.splitlines()
    for text in ("service/batch for user/alice", "StopWorkload", "workload/w-1", "ALLOWED"):
        assert text in first
    assert ("UNAUTHENTICATED" in second, "70" in second) == (True, True)
    found = json.loads(leasehold("get", "audit", "user/alice", "--filter", "count > 1", "-o", "json").stdout)
    assert [entry["number"] for entry in found["audit"]] == ["2", "1"]
    assert asked == ["", 'count > 1 AND identity = "user/alice"']


def test_an_identity_without_entries_is_told(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    def answer(request: audit_service_pb2.ListAuditEntriesRequest, context: object) -> object:
        entries = [AuditEntry(number=1, identity="user/ann")] if "user/ann" in request.filter else []
        return audit_service_pb2.ListAuditEntriesResponse(entries=entries)

    scripted.answers["ListAuditEntries"] = answer
    done = leasehold("get", "audit", "ann")
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr == (
        "leasehold: no entry of the audit is of the identity 'ann': `leasehold get audit` shows identities, "
        "such as user/alice\n"
    )
    done = leasehold("get", "audit", "ann", "user/ann", "-q")
    assert (done.code, done.stdout) == (1, "1\n")
    assert leasehold("get", "audit").code == 0, "an empty audit is no failure"


def test_verify_adds_up_the_parts(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    def answer(request: audit_service_pb2.VerifyAuditRequest, context: object) -> object:
        part = audit_service_pb2.VerifyAuditResponse(entry_count=2, last_number=2, next_page_token="next")
        if request.page_token:
            part = audit_service_pb2.VerifyAuditResponse(entry_count=1, last_number=3, last_hash=b"\xab" * 32)
        return part

    scripted.answers["VerifyAudit"] = answer
    done = leasehold("audit", "verify")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == f"verified 3 entries; entry 3 has hash {'ab' * 32}\n"


def test_a_broken_chain_is_a_failure(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    broken = audit_service_pb2.AuditBreak(number=7, problem="entry 7 was changed")
    scripted.answers["VerifyAudit"] = lambda request, context: audit_service_pb2.VerifyAuditResponse(
        entry_count=6, last_number=6, broken=broken
    )
    done = leasehold("audit", "verify")
    assert done.code == 1
    assert "broken at entry 7: entry 7 was changed" in done.stderr
