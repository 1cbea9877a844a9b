"""Names of workloads by id, also of ended ones, which no live view has."""

from collections.abc import Sequence
from typing import Final

from leasehold.v1.workload_service_pb2 import ListWorkloadsRequest

from leasehold_web.entries import Api

CALL_TIMEOUT_S: Final = 10.0
NAMED_LIMIT: Final = 14
"""Workloads whose names are looked up by one filter of at most 2,048 characters. An id has at most 128."""


async def workload_names(api: Api, ids: Sequence[str]) -> dict[str, str]:
    """The names of workloads by id. Unknown ids are left out."""
    names: dict[str, str] = {}
    for begin in range(0, len(ids), NAMED_LIMIT):
        page = await api.workloads.ListWorkloads(
            ListWorkloadsRequest(
                include_ended=True,
                page_size=NAMED_LIMIT,
                filter=" OR ".join(f'workload = "{one}"' for one in ids[begin : begin + NAMED_LIMIT]),
            ),
            metadata=api.metadata,
            timeout=CALL_TIMEOUT_S,
        )
        names |= {one.workload_id: one.name for one in page.workloads}
    return names
