"""The claims of a worker in the test's own process."""

from leasehold_worker.agent.assembly import Parts
from leasehold_worker.commands.executor import Commands
from leasehold_worker.commands.journal import Journal
from leasehold_worker.host.clock_offset import ClockOffset
from leasehold_worker.local_api.claim_waiting import ClaimWaiting
from leasehold_worker.local_api.claims import LocalClaims
from leasehold_worker.local_api.queries import LocalQueries


def make_claims(parts: Parts, journal: Journal, commands: Commands) -> tuple[LocalClaims, LocalQueries]:
    """Builds the claims and the queries of the local socket as a worker does."""
    claim_waiting = ClaimWaiting(parts.pool, parts.resources, parts.workloads, parts.foreign)
    claims = LocalClaims(
        parts.workloads,
        parts.exit_monitor.add,
        parts.programs,
        parts.host_shares,
        parts.nursery,
        commands,
        journal,
        claim_waiting,
    )
    answers = LocalQueries(
        parts.pool, parts.resources, parts.workloads, commands, claim_waiting, "worker", ClockOffset()
    )
    return claims, answers
