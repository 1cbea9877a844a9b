"""Each method of the client tells an invalid argument as a :class:`UsageError`, before any call."""

import inspect
from collections.abc import Callable, Generator, Mapping, Sequence
from operator import attrgetter
from typing import Any, get_type_hints

import pytest
from leasehold_client import Client, WorkloadSpec
from leasehold_client.coordinator.access_changes import ROLES
from leasehold_client.coordinator.certificates import CertificateCalls
from leasehold_client.coordinator.enrolment import EnrolmentCalls
from leasehold_client.errors import UsageError
from leasehold_client.messages import Moves

from tests.client.scripted_coordinator import ScriptedCoordinator

SURROGATE = "\ud800"
SURROGATES: dict[Any, Any] = {
    str: SURROGATE,
    Sequence[str]: [SURROGATE],
    Mapping[str, str] | None: {"key": SURROGATE},
    Moves: {SURROGATE: [("old", "new")]},
}
"""Arguments with a surrogate, by type."""
VALID: dict[Any, Any] = {
    str: "operator",  # also a role
    int: 1,
    Sequence[str]: ["one"],
    WorkloadSpec: WorkloadSpec(),
}
"""Valid arguments, by type."""
PARTS: dict[str, Any] = {"": Client, "enrolment.": EnrolmentCalls, "certificates.": CertificateCalls}
"""The classes of the client, by how their methods are called."""


@pytest.fixture
def client(scripted: ScriptedCoordinator) -> Generator[Client]:
    """A client of a coordinator that answers reads only."""
    with Client(scripted.address) as made:
        yield made


def text_parameters() -> Generator[Any]:
    """Each method and parameter of the client that takes text."""
    for part, owner in PARTS.items():
        for name, method in inspect.getmembers(owner, inspect.isfunction):
            if name.startswith("_"):
                continue
            for parameter, kind in get_type_hints(method).items():
                if kind in SURROGATES and parameter != "return":
                    yield pytest.param(f"{part}{name}", parameter, id=f"{part}{name}-{parameter}")


def begin(call: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Makes a call, and reads the first response of a stream."""
    returned = call(**arguments)
    if isinstance(returned, Generator):
        next(returned)


@pytest.mark.parametrize(("method", "parameter"), [*text_parameters()])
def test_a_text_with_a_surrogate_is_a_usage_error(
    client: Client, scripted: ScriptedCoordinator, method: str, parameter: str
) -> None:
    call = attrgetter(method)(client)
    hints = get_type_hints(call)
    arguments = {parameter: SURROGATES[hints[parameter]]}
    for other, details in inspect.signature(call).parameters.items():
        is_required = details.default is details.empty and details.kind is not details.VAR_KEYWORD
        # A method with a workload may look its id up.
        if other != parameter and (is_required or other == "workload"):
            arguments[other] = VALID[hints[other]]
    with pytest.raises(UsageError):
        begin(call, arguments)
    assert not scripted.requests


@pytest.mark.parametrize("method", ["grant", "revoke"])
def test_an_unknown_role_is_told_with_the_roles(
    client: Client, scripted: ScriptedCoordinator, method: str
) -> None:
    with pytest.raises(UsageError) as raised:
        getattr(client, method)("king", "user/bob")
    assert raised.value.message == f"unknown role 'king': choose {', '.join(ROLES)}"
    assert "admin" in ROLES
    assert not scripted.requests


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.adopt(10**12, worker="alpha"),
        lambda client: client.suspend("one", expected_generation=10**20, validate_only=True),
        lambda client: client.enrolment.create_join_token("user/bob", uses=2**40),
        lambda client: client.commands(-(10**20)),
        lambda client: client.events(limit=-(10**20)),
        lambda client: client.audit_entries(-(10**20)),
        lambda client: next(client.output("one", offset=10**30)),
        lambda client: next(client.output_parts("one", offset=-(10**30))),
    ],
    ids=["pid", "generation", "uses", "commands", "events", "audit", "output", "parts"],
)
def test_a_number_out_of_range_is_a_usage_error(
    client: Client, scripted: ScriptedCoordinator, call: Callable[[Client], object]
) -> None:
    with pytest.raises(UsageError, match="out of range; give a number from"):
        call(client)
    assert not scripted.requests


@pytest.mark.parametrize(
    ("method", "option"),
    [("stop", "validate_only"), ("suspend", "foo"), ("cordon", "foo"), ("release", "validate_only")],
)
def test_an_unknown_option_is_a_type_error(client: Client, method: str, option: str) -> None:
    texts = (
        {"worker": "alpha", "reason": "fans", "cordoned_by": "bob"}
        if method == "cordon"
        else {"workload": "one"}
    )
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        getattr(client, method)(**texts, **{option: True})
