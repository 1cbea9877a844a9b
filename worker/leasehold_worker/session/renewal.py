"""Keeps the worker's certificate valid. Sessions go on: the coordinator knows both certificates."""

import logging
import random
import time
from contextlib import suppress
from typing import Final, final

import trio

from leasehold_worker.errors import StartError
from leasehold_worker.files.state_directory import StateDirectory
from leasehold_worker.session.channel import INSECURE_SCHEME
from leasehold_worker.session.client_keys import validity_s
from leasehold_worker.session.enrolment import RefusedError, renew
from leasehold_worker.threads import run_in_thread

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 600.0
"""Longest time between two looks at the clock, which may jump."""

RETRY_S: Final = (30.0, 90.0)
"""Least and most wait after a failed renewal."""

WAIT_PART: Final = 5
"""Part of the time between due and expired that lies between two renewals at least."""

LEAST_WAIT_S: Final = 1.0
"""Least wait after a renewal."""

REFUSED_RETRY_S: Final = (1_800.0, 5_400.0)
"""Least and most wait after a refused renewal."""


@final
class Renewal:
    """Renews the certificate of an enrolled worker when it is due.

    Args:
        state_directory: Keeps the key and the certificate.
        coordinator: HOST:PORT of the coordinator's listener for workers.
    """

    def __init__(self, state_directory: StateDirectory, coordinator: str) -> None:
        self._state_directory = state_directory
        self._coordinator = coordinator
        self.validity_s: tuple[float, float] | None = None
        """The times between which the certificate is valid, in seconds of the epoch. None: none is in use."""

    async def run(self) -> None:
        """Renews the certificate again and again, until cancelled. Returns if the worker is not enrolled."""
        while (wait_s := await self._wait_s()) is not None:
            if wait_s > 0:
                await trio.sleep(min(wait_s, LOOK_INTERVAL_S))
                continue
            try:
                least_s = await run_in_thread(self._renew, abandon_on_cancel=True)
                await trio.sleep(least_s)
            except RefusedError as error:
                logger.error("the certificate can't be renewed: %s", error)
                await trio.sleep(random.uniform(*(REFUSED_RETRY_S if error.is_final else RETRY_S)))
            except (OSError, StartError) as error:
                logger.error("the renewed certificate can't be stored: %s", error)
                await trio.sleep(random.uniform(*RETRY_S))

    async def _wait_s(self) -> float | None:
        """As :meth:`_due_in_s`, in a thread."""
        try:
            return await run_in_thread(self._due_in_s, abandon_on_cancel=True)
        except OSError as error:
            logger.error("the certificate can't be read: %s", error)
            return LOOK_INTERVAL_S

    def _renew(self) -> float:
        """Renews the certificate.

        Returns:
            The least seconds until the next renewal, by the coordinator's times alone: by a clock that is
            ahead, each certificate is due at once.

        Raises:
            RefusedError, OSError, StartError: As of :func:`renew`.
        """
        renew(self._state_directory, self._coordinator)
        enrolment = self._state_directory.enrolment()
        if enrolment is None:
            return LEAST_WAIT_S
        self.validity_s = _, expiry_s = validity_s(enrolment.certificate.encode())
        return max(LEAST_WAIT_S, (expiry_s - enrolment.renew_s) / WAIT_PART)

    def _due_in_s(self) -> float | None:
        """Seconds until the certificate is due. None: none is in use."""
        try:
            enrolment = self._state_directory.enrolment()
        except (OSError, StartError) as error:
            logger.error("the certificate can't be read: %s", error)
            return LOOK_INTERVAL_S
        is_insecure = self._coordinator.startswith(INSECURE_SCHEME)
        if enrolment is None or not enrolment.certificate or is_insecure:
            return None
        with suppress(ValueError):  # the session reports a damaged certificate
            self.validity_s = validity_s(enrolment.certificate.encode())
        return enrolment.renew_s - time.time()
