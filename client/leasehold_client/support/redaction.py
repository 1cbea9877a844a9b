"""Removal of secrets from the bundle: values of settings and messages that could be secrets.

Documents keep only named fields. Text of logs and errors has no fields: known forms of secrets are removed.
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

REMOVED: Final = "(removed)"

Fields: TypeAlias = Mapping[str, "Fields | None"]
"""The kept fields of a document by name, and those of its nested documents. None: the whole value."""

SETTINGS: Final[Mapping[str, frozenset[str]]] = {
    "worker.toml": frozenset(
        {
            "adopt_users",
            "checkpoint_expiry_s",
            "checkpoint_limit",
            "coordinator",
            "cpu_limit_millicores",
            "credentials",
            "criu",
            "disk_reserve",
            "driver_call_floor_s",
            "gpu_units",
            "gpus",
            "health_listen",
            "host_memory_reserve_bytes",
            "image_dir",
            "inherited_variables",
            "keep_images",
            "kernel_quiescence_s",
            "kernel_start_s",
            "log_format",
            "log_level",
            "memory_limit",
            "metrics_listen",
            "metrics_tls_certificate",
            "metrics_tls_client_ca",
            "metrics_tls_key",
            "name",
            "output_limit",
            "parked_memory_limit",
            "proof_timeout_s",
            "run_as",
            "run_as_min_uid",
            "socket",
            "socket_group",
            "state_dir",
            "stop_workloads",
            "user_priority_limit",
        }
    ),
    "coordinator.toml": frozenset(
        {
            "audit_file",
            "audit_retention_days",
            "ca_life_days",
            "caller_bytes_per_s",
            "caller_commands",
            "caller_requests_per_s",
            "caller_streams",
            "client_certificate_days",
            "clock_corrected",
            "database",
            "health_listen",
            "insecure",
            "join_listen",
            "listen",
            "load_interval_s",
            "log_format",
            "log_level",
            "metrics_listen",
            "oidc_listen",
            "retention_s",
            "server_certificate_days",
            "server_names",
            "socket",
            "state_dir",
            "store_restored",
            "tls_certificate",
            "tls_client_ca",
            "tls_key",
            "trust_domain",
            "user_priority_limit",
            "web",
            "worker_listen",
        }
    ),
    "cli.toml": frozenset({"coordinator"}),
}
"""Settings whose values are kept. Labels are texts of users, and ``oidc`` has addresses of others."""

_WORDS: Final = (
    "password|passwd|passphrase|pwd|secret|token|api[_-]?key|private[_-]?key|access[_-]?key|credential"
)
"""Words in the names of secrets."""

_VALUE: Final = r"""("(?:[^"\\\n]|\\.){0,4096}"|'[^'\n]{0,4096}'|\S+)"""
"""A value in text: quoted, or up to a space."""


def _option(found: re.Match[str]) -> str:
    return found[1] + REMOVED if re.search(_WORDS, found[1], re.IGNORECASE) else found[0]


def _url(found: re.Match[str]) -> str:
    _, sign, place = found[2].rpartition("@")  # a password may have this sign too
    return found[1] + (f"{REMOVED}@" if sign else "") + place


_TOKENS: Final = (
    r"(?<![A-Za-z0-9])(?:"
    r"gh[oprsu]_\w{16,}|github_pat_\w{16,}"  # GitHub
    r"|gl(?:pat|dt|rt|rtr|ptt|ft|cbt|soat|imt|agent|oas|ffct)-[\w.-]{16,}"  # GitLab
    r"|xox[a-z](?:\.xox[a-z])?-[\w-]{10,}|xapp-[\w-]{10,}"  # Slack
    r"|(?:AKIA|ASIA)[A-Z0-9]{12,}"  # AWS
    r"|AIza[\w-]{30,}|ya29\.[\w-]{16,}"  # Google
    r"|hf_[A-Za-z0-9]{16,}"  # Hugging Face
    r"|sk-[\w-]{16,}|[prs]k_(?:live|test)_\w{16,}"  # OpenAI, Anthropic, Stripe
    r"|nvapi-[\w-]{16,}"  # NVIDIA
    r"|pypi-[\w-]{16,}|npm_[A-Za-z0-9]{16,}|dckr_pat_[\w-]{16,}"  # registries
    r"|eyJ[\w-]{1,512}(?:\.[\w-]{0,65535}){2,4}"  # JSON Web Tokens: signed, encrypted
    r")"
)
"""Tokens of other products, which their first letters tell. An unbounded repetition is at the end of its
alternative, so that no text is read twice."""

_SECRETS: Final[tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]] = (
    (re.compile(r"\A(?:(?!.*-----BEGIN ).*\n){0,100}?.*-----END [A-Z0-9 ]+-----"), REMOVED),
    (re.compile(r"-----BEGIN [A-Z0-9 ]+-----.*?(-----END [A-Z0-9 ]+-----|\Z)", re.DOTALL), REMOVED),
    (re.compile(r"leasehold-join-[\w-]+"), f"leasehold-join-{REMOVED}"),
    (re.compile(_TOKENS), REMOVED),
    (re.compile(r"(?i)\b(bearer|basic) +[\w.~+/=-]{8,}"), rf"\1 {REMOVED}"),
    (
        re.compile(rf"(?i)((?:{_WORDS})[\w-]{{0,64}}[\"']?\s{{0,8}}[=:]\s{{0,8}}){_VALUE}"),
        rf"\1{REMOVED}",
    ),
    (re.compile(rf"(?<![\w-])(--[\w-]++ +){_VALUE}"), _option),
    (re.compile(r"(pid \d+ of [^\s(]+) \(.{0,4096}\)"), rf"\1 ({REMOVED})"),
    (re.compile(r"(\w://)([^\s\"']*)"), _url),
)
"""Forms of secrets in text: keys and certificates, also those whose begin is cut off, join tokens, tokens of
other products, headers, assignments, options, command lines of foreign processes, and logins in URLs. Bounded
repetitions keep the time linear."""


def without_secrets(text: str) -> str:
    """A text without known forms of secrets."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def kept_settings(name: str, settings: Mapping[str, object]) -> dict[str, object]:
    """The settings of a file. An unknown setting keeps its name and loses its value."""
    return {key: _scrubbed(value) if key in SETTINGS[name] else REMOVED for key, value in settings.items()}


def kept_fields(document: object, fields: Fields) -> object:
    """A JSON document with the named fields only, without known forms of secrets in its texts."""
    if isinstance(document, list):
        return [kept_fields(entry, fields) for entry in document]
    if not isinstance(document, dict):
        return document
    return {
        key: _scrubbed(value) if (inner := fields[key]) is None else kept_fields(value, inner)
        for key, value in document.items()
        if key in fields
    }


def _scrubbed(value: object) -> object:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, list):
        return [_scrubbed(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _scrubbed(entry) for key, entry in value.items()}
    return value
