"""How many examples the fuzzing tests play."""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import pytest
from hypothesis import HealthCheck, seed, settings

from tests import environment

Examples: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A decorator of what ``given`` returns."""

_FEW: Final = settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
_MANY: Final = settings(_FEW, max_examples=400, derandomize=False, database=None)


@pytest.fixture(params=["few", pytest.param("many", marks=pytest.mark.long)])
def examples(request: pytest.FixtureRequest) -> Examples:
    """Few examples, always the same; or many, which are others each day."""
    if request.param == "few":
        return _FEW
    return lambda test: seed(environment.seed())(_MANY(test))
