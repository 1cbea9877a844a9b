"""``leasehold version``: both sides."""

import json

import pytest
from leasehold.v1.access_service_pb2 import WhoAmIResponse
from leasehold_client import __version__

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator


def test_both_sides_are_shown(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["WhoAmI"] = lambda request, context: WhoAmIResponse(coordinator_version="7.1")
    assert leasehold("version").stdout == (
        f"client       {__version__}\ncoordinator  7.1 at {scripted.address}\n"
    )
    document = json.loads(leasehold("version", "-o", "json").stdout)
    assert document["client"] == {"version": __version__}
    assert document["coordinator"] == {"version": "7.1", "address": scripted.address}
    scripted.answers["WhoAmI"] = lambda request, context: WhoAmIResponse()
    assert "coordinator  unknown" in leasehold("version").stdout


@pytest.mark.usefixtures("short_outages")
def test_the_client_is_shown_without_a_coordinator(bare_leasehold: CommandLine) -> None:
    done = bare_leasehold("version", "--coordinator", "127.0.0.1:1")
    assert (done.code, done.stdout) == (3, f"client       {__version__}\n")
    assert bare_leasehold("version", "--client").stdout == f"client       {__version__}\n"
    assert json.loads(bare_leasehold("version", "--client", "-o", "json").stdout) == {
        "client": {"version": __version__}
    }
