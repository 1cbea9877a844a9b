"""Grids of cases: a few of them in ``make test``, and the rest in ``make test-long``."""

from collections.abc import Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

Case = TypeVar("Case")


def grid(cases: Iterable[Case], *kept: Case) -> list[Case | ParameterSet]:
    """The cases of a grid, all long except those to keep in ``make test``, which must be among them."""
    listed = list(cases)
    assert set(kept) <= set(listed), kept
    return [case if case in kept else pytest.param(case, marks=pytest.mark.long) for case in listed]
