"""Identities: what is one, and what is not."""

import pytest
from leasehold_coordinator.access.identities import Identity, Kind, parse_identity, parse_uri


def test_an_identity_is_a_kind_and_a_name() -> None:
    assert parse_identity("user/alice@example.org") == Identity(Kind.USER, "alice@example.org")
    assert str(Identity(Kind.WORKER, "gpu-07")) == "worker/gpu-07"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "alice",
        "user",
        "user/",
        "root/x",
        "user/-a",
        "user/a b",
        "user/a/b",
        "USER/a",
        "user/" + "x" * 65,
        "user/é",
    ],
)
def test_other_texts_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="identity"):
        parse_identity(text)


def test_a_uri_carries_an_identity_of_one_trust_domain() -> None:
    identity = Identity(Kind.SERVICE, "batch")
    assert parse_uri(identity.uri("example.org"), "example.org") == identity


@pytest.mark.parametrize(
    "uri",
    [
        "leasehold://other/user/alice",
        "https://leasehold/user/alice",
        "leasehold://leasehold/local/root",
        "leasehold://leasehold/user/alice/",
        "leasehold://leasehold//user/alice",
        "leasehold://leasehold/user/alice?x=1",
    ],
)
def test_other_uris_are_refused_with_the_expected_form(uri: str) -> None:
    with pytest.raises(ValueError, match="expected leasehold://leasehold/worker/NAME"):
        parse_uri(uri, "leasehold")


def test_a_pattern_covers_names_of_one_kind() -> None:
    assert Identity(Kind.WORKER, "gpu-07").matches("worker/gpu-*")
    assert not Identity(Kind.USER, "gpu-07").matches("worker/gpu-*")
    assert not Identity(Kind.WORKER, "cpu-07").matches("worker/gpu-*")
