"""Answers to checkpoint_query: the checkpoints on this worker's disk, page by page."""

import logging
from typing import Final

from leasehold.v1.checkpoint_pb2 import Checkpoint
from leasehold.worker.v1.session_pb2 import CheckpointAnswer, CheckpointQuery

from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.checkpoints.volume_calls import call_volume
from leasehold_worker.errors import OperationError, defect

logger = logging.getLogger(__name__)

ANSWER_LIMIT_BYTES: Final = 131_072
"""Size of the message: half a frame, as for hello."""


async def answer_checkpoints(
    disk: CheckpointDirectory, query: CheckpointQuery, worker_id: str
) -> CheckpointAnswer:
    """The checkpoints after the one that the query names, newest first, as many as fit; or the error.

    If that one was deleted meanwhile, the list starts again.
    """
    try:
        found = await call_volume(disk.checkpoints, query.workload_id)
    except OperationError as error:
        return CheckpointAnswer(query_id=query.query_id, error=error.to_proto())
    except Exception:  # a failed query must not end the worker
        logger.exception("the checkpoints can't be listed because of a defect")
        return CheckpointAnswer(query_id=query.query_id, error=defect().to_proto())
    for checkpoint in found:
        checkpoint.worker_id = worker_id
    ids = [checkpoint.checkpoint_id for checkpoint in found]
    if query.after_checkpoint_id in ids:
        found = found[ids.index(query.after_checkpoint_id) + 1 :]
    page = _page(found)
    return CheckpointAnswer(query_id=query.query_id, checkpoints=page, more=len(page) < len(found))


def _page(checkpoints: list[Checkpoint]) -> list[Checkpoint]:
    size = 0
    for number, checkpoint in enumerate(checkpoints):
        size += checkpoint.ByteSize() + 8
        if size > ANSWER_LIMIT_BYTES and number:
            return checkpoints[:number]
    return checkpoints
