"""What a bundle keeps and removes."""

import re
import time

import msgspec
import pytest
from leasehold_client.support.redaction import SETTINGS, kept_fields, kept_settings, without_secrets
from leasehold_coordinator.server.config import CoordinatorConfig
from leasehold_worker.agent.config import WorkerConfig

CANARY = "canary-4f1d9c"
LETTERS = "canary4f1d9c8b2e71"
CAPITALS = "CANARY4F1D9C8B2E71"


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


@pytest.mark.parametrize("place", ["{}", "refused: {}", "url=https://x/?q={}&b=1", '["{}"]', "a-{}, next"])
@pytest.mark.parametrize(
    "token",
    [
        *(f"gh{kind}_{LETTERS}" for kind in "oprsu"),
        f"github_pat_11AB_{LETTERS}",
        f"glpat-{LETTERS}",
        f"glrt-t3_{LETTERS}.01",
        f"xoxb-1234567890-{LETTERS}",
        f"xoxe.xoxp-1-{LETTERS}",
        f"xapp-1-A0-{LETTERS}",
        f"AKIA{CAPITALS}",
        f"ASIA{CAPITALS}",
        f"AIzaSyA-{LETTERS}-{LETTERS}",
        f"ya29.a0-{LETTERS}",
        f"hf_{LETTERS}",
        f"sk-{LETTERS}",
        f"sk-ant-api03-{LETTERS}-{LETTERS}",
        f"sk_live_{LETTERS}",
        f"nvapi-{LETTERS}",
        f"pypi-AgEI{LETTERS}",
        f"npm_{LETTERS}",
        f"dckr_pat_{LETTERS}",
        f"eyJhbGciOi.{LETTERS}.{LETTERS}",
        f"eyJhbGciOi..{LETTERS}.{LETTERS}.{LETTERS}",
    ],
)
def test_tokens_of_other_products_are_removed_wherever_they_stand(token: str, place: str) -> None:
    told = without_secrets(place.format(token))
    assert not {LETTERS, CAPITALS} & set(re.findall(r"[A-Za-z0-9]+", told)), told
    assert "(removed)" in told


def test_a_key_whose_begin_is_cut_off_is_removed() -> None:
    lines = [f"2026-11-26 leasehold[1]: {LETTERS}" for _ in range(50)]
    log = "\n".join([*lines, "2026-11-26 leasehold[1]: -----END X509 CRL-----", "the next line"])
    assert without_secrets(log) == "(removed)\nthe next line"
    whole = "first\n-----BEGIN KEY-----\nsecond\n-----END KEY-----\nlast"
    assert without_secrets(whole) == "first\n(removed)\nlast"


@pytest.mark.parametrize(
    "line",
    [
        "hf_model_name_or_path: meta/llama-3.1-70b-instruct",
        "disk-usage-of-the-whole-machine 93 %, task-1234567890abcdefgh",
        "glibc-2.36-9-and-newer-versions, boxox-and-greetings-to-all",
        "command c-5e1f00aabbccddeeff00112233445566 of GPU-6d1b2c3a-0000-1111-2222-333344445555",
        "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "BAKIA" + CAPITALS,
    ],
)
def test_ordinary_words_are_no_tokens(line: str) -> None:
    assert without_secrets(line) == line


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
        "sk-",
        "glpat-",
        "-hf_a",
        "xoxa-",
        "a\n",
        "-----END A",
        "-----END A\n",
    ],
)
def test_the_time_is_linear_in_the_text(piece: str) -> None:
    text = piece * (2**18 // len(piece))  # quadratic, this would take minutes
    began = time.thread_time()
    without_secrets(text)
    assert time.thread_time() - began < 5.0


def test_ordinary_lines_stay() -> None:
    line = "INFO leasehold_worker.commands.executor: [epoch=1 command=c-5e1f] suspend SUCCEEDED after 0.412 s"
    assert without_secrets(line) == line
