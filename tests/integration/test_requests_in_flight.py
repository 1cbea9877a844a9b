"""A model server that is parked while it works on a request."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from leasehold_client.arguments.policies import parse_policy

from .fleets import Fleet
from .models import WORKER, Model, reason


@pytest.fixture
def model(empty_fleet: Fleet) -> Iterator[Model]:
    empty_fleet.start_worker(WORKER)
    started = Model(empty_fleet, "chat")
    started.start()
    yield started
    started.client.wait(started.client.stop(started.name, grace_s=0, force=True), check=False)


@contextmanager
def request_in_flight(model: Model) -> Iterator[list[Any]]:
    """A client that waits for the answer to a request, until `/finish`. Yields where its answer comes."""
    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(model.call("POST", "/generate?hold=one")))
    client.start()
    model.fleet.wait(lambda: model.state()["in_flight"] == 1)
    try:
        yield answers
    finally:
        model.call("POST", "/finish?hold=one")
        client.join()


def test_a_suspend_waits_for_requests(model: Model) -> None:
    with request_in_flight(model) as answers:
        command = model.client.suspend(model.name, policy=parse_policy("offload+keep_running"))
        model.fleet.wait(lambda: model.state()["says_it_sleeps"])
        assert model.state()["sleeping"] == []
    assert reason(model.client.wait(command)) == "SUCCEEDED"
    assert answers == [(200, {"finish_reason": "stop"})]
    model.require_parked("keep_running", freed="weights")
    assert reason(model.wake()) == "SUCCEEDED"
    model.require_running()


@pytest.mark.long
def test_a_suspend_that_is_cancelled_while_requests_end_leaves_the_server_awake(model: Model) -> None:
    with request_in_flight(model):
        command = model.client.suspend(model.name, policy=parse_policy("offload+keep_running"))
        model.fleet.wait(lambda: model.state()["says_it_sleeps"])
        model.client.cancel(command.command_id)
        assert reason(model.client.wait(command, check=False)) == "CANCELLED"
    model.require_running()
