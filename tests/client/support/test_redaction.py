"""What a bundle keeps and removes."""

import time

import msgspec
import pytest
from leasehold_client.support.redaction import SETTINGS, kept_fields, kept_settings, without_secrets
from leasehold_coordinator.server.config import CoordinatorConfig
from leasehold_worker.agent.config import WorkerConfig

CANARY = "canary-4f1d9c"


@pytest.mark.parametrize(
    ("name", "config", "left_out"),
    [("worker.toml", WorkerConfig, {"labels"}), ("coordinator.toml", CoordinatorConfig, {"oidc"})],
)
def test_each_setting_is_either_kept_or_left_out(
    name: str, config: type[msgspec.Struct], left_out: set[str]
) -> None:
    assert SETTINGS[name] | left_out == set(config.__struct_fields__)


def test_values_of_unknown_settings_are_removed() -> None:
    settings = {
        "name": "alpha",
        "gpus": ["GPU-1"],
        "password": CANARY,
        "credentials": f"/x?password={CANARY}",
        "labels": {"team": CANARY},
        "coordinator": f"https://ann:{CANARY}@host:1/",
    }
    assert kept_settings("worker.toml", settings) == {
        "name": "alpha",
        "gpus": ["GPU-1"],
        "password": "(removed)",
        "credentials": "/x?password=(removed)",
        "labels": "(removed)",
        "coordinator": "https://(removed)@host:1/",
    }


def test_only_named_fields_are_kept_at_each_depth() -> None:
    document = {"a": 1, "b": {"c": [{"d": 2, "e": CANARY}], "f": CANARY}, "g": CANARY}
    assert kept_fields(document, {"a": None, "b": {"c": {"d": None}}}) == {"a": 1, "b": {"c": [{"d": 2}]}}
    nested = kept_fields({"a": {"b": [f"token={CANARY}"]}}, {"a": None})
    assert nested == {"a": {"b": ["token=(removed)"]}}


@pytest.mark.parametrize(
    "text",
    [
        f"-----BEGIN EC PRIVATE KEY-----\n{CANARY}\n-----END EC PRIVATE KEY-----",
        f"-----BEGIN PRIVATE KEY-----\n{CANARY}",
        f"leasehold-join-{CANARY}",
        f"authorization: Bearer {CANARY}",
        f"DB_PASSWORD={CANARY}",
        f"api_key: '{CANARY} {CANARY}'",
        f'{{"client_secret": "{CANARY}"}}',
        f"--hf-token={CANARY}",
        f"postgresql://ann:{CANARY}@db/leasehold",
        f"postgresql://ann:p@ss/{CANARY}@db/leasehold",
        f"X-Api-Key: {CANARY}",
        f"PGPASSWORD=a,b;c){CANARY}",
        f'"password": "a\\"{CANARY}"',
        f"serve --hf-token {CANARY}",
        f"serve --password '{CANARY} {CANARY}'",
        f"eyJhbGciOi.{CANARY}.{CANARY}",
        f"pid 468 of ann (python serve.py --key {CANARY}) holds 576.0 MiB",
        f"pid 468 of ann (python -c print(1) {CANARY}) holds 576.0 MiB",
    ],
)
def test_known_forms_of_secrets_are_removed_from_text(text: str) -> None:
    assert CANARY not in without_secrets(f"before {text} after")


@pytest.mark.long
@pytest.mark.parametrize(
    "piece",
    [
        "a",
        "token",
        "token-",
        'token="',
        "eyJ-",
        "eyJa.",
        "pid 1 of a (",
        "a://",
        "--token",
        "--token-",
        "--token ",
        '--token "',
        "-----BEGIN A",
        "Bearer ",
        "token ",
    ],
)
def test_the_time_is_linear_in_the_text(piece: str) -> None:
    text = piece * (2**20 // len(piece))
    began = time.thread_time()
    without_secrets(text)
    assert time.thread_time() - began < 5.0


def test_ordinary_lines_stay() -> None:
    line = "INFO leasehold_worker.commands.executor: [epoch=1 command=c-5e1f] suspend SUCCEEDED after 0.412 s"
    assert without_secrets(line) == line
