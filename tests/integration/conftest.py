"""Fleets and hosts for tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .fleets import Fleet, make_fleet
from .local_hosts import LocalHost, local_side, make_local_host
from .mutual_tls import why_not


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="local"),
        pytest.param(True, id="mutual-tls", marks=pytest.mark.long),
    ],
)
def is_mutual(request: pytest.FixtureRequest) -> bool:
    """Whether the fleet uses mutual TLS. Each test of a fleet is played so, and with tokens on loopback."""
    if request.param and why_not():
        pytest.skip(why_not())
    return bool(request.param)


@pytest.fixture
def empty_fleet(tmp_path: Path, is_mutual: bool) -> Iterator[Fleet]:
    """A coordinator without workers."""
    with make_fleet(tmp_path, is_mutual=is_mutual) as started:
        yield started


@pytest.fixture
def fleet(empty_fleet: Fleet) -> Fleet:
    """A coordinator and the worker alpha with four GPUs."""
    empty_fleet.start_worker("alpha")
    return empty_fleet


@pytest.fixture
def new_host(tmp_path: Path) -> Iterator[Callable[[int], LocalHost]]:
    """Makes hosts as :func:`make_local_host` does, and ends them."""
    hosts: list[LocalHost] = []

    def new(gpus: int) -> LocalHost:
        hosts.append(make_local_host(tmp_path / f"host{len(hosts)}", gpus))
        return hosts[-1]

    yield new
    for host in hosts:
        host.close()


@pytest.fixture
def restarting_host(new_host: Callable[[int], LocalHost]) -> LocalHost:
    """A host with two GPUs, and a worker that the test may end."""
    host = new_host(2)
    host.start_worker()
    return host


@pytest.fixture
def local_host(shared_host: LocalHost) -> Iterator[LocalHost]:
    """A host with two GPUs, on which nothing runs, and its worker."""
    yield shared_host
    shared_host.clear()
    shared_host.wait(lambda: not (shared_host.look().workloads or shared_host.look().waiting))


@pytest.fixture(scope="module")
def shared_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalHost]:
    """The host of all tests of a module."""
    host = make_local_host(tmp_path_factory.mktemp("shared") / "host", 2)
    host.start_worker()
    yield host
    host.close()


@pytest.fixture
def alpha(fleet: Fleet, tmp_path: Path) -> Iterator[LocalHost]:
    """The local side of the fleet's worker."""
    host = local_side(fleet, "alpha", tmp_path / "local")
    yield host
    host.close()
