"""How many descriptors the worker may have open: more than the programs that it starts."""

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

LIMIT: Final = 65_536
"""Descriptors that the worker may have at most."""

STARTED_WITH: Final = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""The soft limit with which the worker was started, and with which its programs are."""


def raise_limit() -> int:
    """Allows the worker as many descriptors as its host does, within bounds. Returns how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = LIMIT if hard == resource.RLIM_INFINITY else min(hard, LIMIT)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError) as error:
            logger.warning("the limit of descriptors stays %d: %s", soft, error)
        else:
            return most
    return most if soft == resource.RLIM_INFINITY else soft
