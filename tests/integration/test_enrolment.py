"""A coordinator off loopback: who gets a join token, and what it is worth."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.coordinator.commands.test_enrolment import read_ticket
from tests.integration.fleets import Fleet, make_fleet

SETTINGS = 'server_names = ["localhost"]\n'


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A coordinator that other hosts reach, with directories of its own. Verbs use its socket."""
    folder = tmp_path_factory.mktemp("enrolment")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CONFIG_HOME", "HOME"):
            (folder / name).mkdir(mode=0o700)
            patch.setenv(name, str(folder / name))
        settings = folder / "coordinator.toml"
        settings.write_text(SETTINGS)
        listen = ("--listen", "0.0.0.0:0", "--worker-listen", "0.0.0.0:0", "--config", str(settings))
        with make_fleet(folder, *listen) as started:
            started.address = f"unix:{folder / 'store.sock'}"
            yield started


def tokens(fleet: Fleet) -> dict[str, Any]:
    """The join tokens by identity."""
    listed = json.loads(fleet.cli("token", "list", "-o", "json").stdout)["join_tokens"]
    return {token["identity"]: token for token in listed}


def test_a_token_is_created_listed_and_deleted(fleet: Fleet) -> None:
    ticket = read_ticket(fleet.cli("token", "create", "--worker", "gpu-*", "--uses", "3").stdout.strip())
    host, _, port = ticket.address.rpartition(":")
    assert (host, ticket.identity, len(ticket.secret)) == ("localhost", "worker/gpu-*", 32)
    assert int(port)
    assert ticket.ca_certificates
    token = tokens(fleet)["worker/gpu-*"]
    assert (token["uses_left"], token["creator"][:6]) == (3, "local/")
    assert ticket.secret.hex() not in str(token)
    fleet.cli("token", "delete", token["join_token_id"])
    assert "worker/gpu-*" not in tokens(fleet)
    fleet.refuse("token", "delete", token["join_token_id"], code=1, match="UNKNOWN_JOIN_TOKEN")


def test_a_token_for_nobody_or_for_a_unix_user_is_refused(fleet: Fleet) -> None:
    fleet.refuse("token", "create", code=2, match="name one identity")
    fleet.refuse("token", "create", "--user", "a", "--worker", "b", code=2, match="name one identity")
    fleet.refuse("token", "create", "--user", "a/b", code=1, match="is no name of an identity")


def test_on_loopback_nobody_joins(tmp_path: Path) -> None:
    with make_fleet(tmp_path) as loopback:
        match = "has no listener for enrolment"
        loopback.refuse("token", "create", "--worker", "a", code=1, match=match)
