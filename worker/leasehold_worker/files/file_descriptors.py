"""The worker's limit of open descriptors, which is higher than that of its programs."""

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

LIMIT: Final = 65_536
"""Descriptors that the worker may have at most."""

STARTED_WITH: Final = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
"""The soft limit at the worker's start, which its programs get."""


def raise_limit() -> int:
    """Raises the worker's limit as far as its host permits, within bounds. Returns the limit."""
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
