"""Settings of hypothesis for every test."""

from typing import Final

from hypothesis import HealthCheck, settings

PATIENT: Final = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The time that an example takes says nothing on a busy machine."""
