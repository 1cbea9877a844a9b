"""The coordinator's configuration: flags, then LEASEHOLD_* variables, then a TOML file, then defaults."""

import codecs
import datetime
import errno
import ipaddress
import os
import re
import shlex
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from leasehold_coordinator.access.authority import IssueRules
from leasehold_coordinator.access.bearer_tokens import OidcSettings
from leasehold_coordinator.access.identities import NAME, NAME_RULE
from leasehold_coordinator.access.key_source import check_url
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.fleet.caller_bounds import CallerLimits
from leasehold_coordinator.log_format import LogFormat
from leasehold_coordinator.server.own_pki import PkiFiles
from leasehold_coordinator.server.ports import INSECURE_SCHEME
from leasehold_coordinator.server.settings_keys import explain, require_known, require_no_nul

SYSTEM_FILE: Final = Path("/etc/leasehold/coordinator.toml")
SYSTEM_SOCKET: Final = Path("/run/leasehold/coordinator/coordinator.sock")
"""The socket of a coordinator for all users of its host, as clients know it."""
DEFAULT_LISTEN: Final = "127.0.0.1:7400"
DEFAULT_WORKER_LISTEN: Final = "127.0.0.1:7401"
JOIN_PORT: Final = 7402
TRUST_DOMAIN: Final = re.compile(r"[a-z0-9][a-z0-9.-]{0,254}")
DNS_NAME: Final = re.compile(
    r"(?=.{1,253}$)([\w]([\w-]{0,61}[\w])?\.)*(?!\d+$)[\w]([\w-]{0,61}[\w])?", re.ASCII
)
"""A DNS name without a final dot. Container engines permit underscores. Its last label is not a number."""
LIFE_LIMIT_DAYS: Final = 36_500
LOG_LEVELS: Final = ("debug", "info", "warning", "error")

_RANGES: Final = {
    "load_interval_s": (0.05, 3600, " seconds"),
    "retention_s": (60, 1e9, " seconds"),
    "audit_retention_days": (1, LIFE_LIMIT_DAYS, " days"),
    "caller_requests_per_s": (1, 1e6, ""),
    "caller_bytes_per_s": (1, 1e12, ""),
    "caller_streams": (1, 1e6, ""),
    "caller_commands": (1, 1e6, ""),
}
"""The least and the greatest value of settings, and their unit."""

ROLES: Final = ("viewer", "user", "operator", "admin")

FILE_LIMIT_BYTES: Final = 1_000_000
"""Most bytes of a settings file."""


def is_loopback(host: str) -> bool:
    """Whether an address is the name ``localhost``, or a literal of the loopback network."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def default_state_directory() -> str:
    """The default directory of tokens, store and socket.

    Raises:
        StartError: The user has no home directory.
    """
    try:
        base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    except RuntimeError:
        raise StartError("this user has no home directory: set HOME or XDG_STATE_HOME") from None
    return str(Path(base) / "leasehold")


CALLER: Final = CallerLimits()


class CoordinatorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A coordinator's settings. Its fields are the keys of the file."""

    listen: str = DEFAULT_LISTEN
    """Address for clients, HOST:PORT. Port 0 takes a free port."""
    worker_listen: str = DEFAULT_WORKER_LISTEN
    """Address for workers, HOST:PORT. Port 0 takes a free port."""
    join_listen: str = ""
    """Address for enrolment, HOST:PORT. Empty: port 7402 beside a listener off loopback, or else none."""
    oidc_listen: str = ""
    """Address for users with tokens of an OpenID Connect issuer, HOST:PORT. Empty: none."""
    oidc: OidcSettings | None = None
    """The OpenID Connect issuer."""
    web: str = ""
    """Address for browsers, HOST:PORT: the web page, with TLS off loopback. Empty: none."""
    health_listen: str = ""
    """Address for health checks without TLS and identity, HOST:PORT. Empty: none."""
    metrics_listen: str = ""
    """Address for metrics, HOST:PORT, or insecure:HOST:PORT without TLS. Empty: none."""
    state_dir: str = msgspec.field(default_factory=default_state_directory)
    """Directory of the keys and tokens. Coordinators of one Unix user may share it."""
    database: str = ""
    """Path of the SQLite store, or a URL of SQLAlchemy. Empty: coordinator.sqlite3 in the state directory."""
    socket: str = ""
    """Path of the socket for clients of this host. Empty: the path of the store with the suffix .sock, or
    coordinator.sock in the state directory if the store is a URL."""
    server_names: list[str] = []
    """Further names and addresses by which clients and workers call this host, besides its name and those of
    the listeners. The server's certificate has them."""
    trust_domain: str = "leasehold"
    """The trust domain of identities in certificates: leasehold://TRUST_DOMAIN/KIND/NAME."""
    ca_life_days: float = 3650.0
    """How long a new certificate authority is valid."""
    server_certificate_days: float = 90.0
    """How long the server's certificate is valid. Another one is issued at half of this time."""
    client_certificate_days: float = 30.0
    """How long certificates of workers, users and services are valid."""
    insecure: bool = False
    """Serve clients and workers without TLS. Whoever is on the network path can read and steal the tokens."""
    user_priority_limit: int = 0
    """The highest priority of users' workloads. Operators may give any."""
    tls_certificate: str = ""
    """File with the server's certificate of a PKI of others, as PEM, for addresses off loopback. With it, the
    coordinator signs no certificate, and nobody enrols. Empty: the CA of the state directory."""
    tls_key: str = ""
    """File with the private key of ``tls_certificate``, as PEM."""
    tls_client_ca: str = ""
    """File with the certificates of the authorities of clients and workers, as PEM."""
    load_interval_s: float = 5.0
    """Time between two loads of a worker."""
    retention_s: float = 30 * 86_400.0
    """How long events, ended commands and ended workloads are kept, in seconds of service after their end.
    Jumps of the host's clock have no effect."""
    audit_retention_days: float = 400.0
    """How long entries of the audit are kept, in days of service."""
    audit_file: str = ""
    """File of JSON lines that gets each entry of the audit, an absolute path. Empty: none. Files have 64 MiB,
    and the newest 8 are kept."""
    store_restored: bool = False
    """Whether the store is an older copy, such as a backup: enrolled workers may know later epochs, and valid
    certificates may be missing."""
    clock_corrected: bool = False
    """Whether the host's clock was ahead for a while and is right now. The later time that the store has seen
    is then forgotten. Otherwise, credentials expire by it."""
    caller_requests_per_s: float = CALLER.requests_per_s
    """Requests per second of one caller. A caller that was idle may use those of 4 seconds at once."""
    caller_bytes_per_s: float = CALLER.bytes_per_s
    """Bytes of requests per second of one caller, with the same burst."""
    caller_streams: int = CALLER.streams
    """Watches and other streams of one caller at once."""
    caller_commands: int = CALLER.commands
    """Unfinished commands of one caller."""
    log_level: str = "info"
    """debug, info, warning or error."""
    log_format: LogFormat = "text"
    """text or json, on standard error."""

    @property
    def caller_limits(self) -> CallerLimits:
        """The bounds of each caller."""
        return CallerLimits(
            self.caller_requests_per_s, self.caller_bytes_per_s, self.caller_streams, self.caller_commands
        )

    @property
    def issue_rules(self) -> IssueRules:
        """How the CA issues certificates."""
        days = self.ca_life_days, self.server_certificate_days, self.client_certificate_days
        return IssueRules(self.trust_domain, *(datetime.timedelta(days=one) for one in days))

    @property
    def pki_files(self) -> PkiFiles | None:
        """The files of a PKI of others. None: there is none."""
        if not self.tls_certificate:
            return None
        return PkiFiles(Path(self.tls_certificate), Path(self.tls_key), Path(self.tls_client_ca))

    @property
    def join_address(self) -> str:
        """``join_listen``, or its default. Empty: there is no listener for enrolment."""
        if self.join_listen or self.insecure or self.tls_certificate:
            return self.join_listen
        for address in (self.listen, self.worker_listen):
            host, _, port = address.rpartition(":")
            if not is_loopback(host):
                return f"{host}:{JOIN_PORT if int(port) else 0}"
        return ""

    @property
    def metrics_address(self) -> str:
        """``metrics_listen`` without its scheme."""
        return self.metrics_listen.removeprefix(INSECURE_SCHEME)

    @property
    def has_metrics_tls(self) -> bool:
        """Whether scrapes need TLS and a client certificate: off loopback, unless set otherwise."""
        is_insecure = self.insecure or self.metrics_listen.startswith(INSECURE_SCHEME)
        return not is_insecure and not is_loopback(self.metrics_listen.rpartition(":")[0])

    @property
    def store(self) -> str:
        """``database``, or its default."""
        return self.database or str(Path(self.state_dir) / "coordinator.sqlite3")

    @property
    def socket_path(self) -> Path:
        """``socket``, or its default."""
        if self.socket:
            return Path(self.socket)
        if "://" in self.store:
            return Path(self.state_dir) / "coordinator.sock"
        return Path(self.store).with_suffix(".sock")

    @property
    def socket_option(self) -> str:
        """The option by which a client of this host finds the socket. Empty: a default socket needs none."""
        path, known = self.socket_path.absolute(), [SYSTEM_SOCKET]
        with suppress(StartError):  # no home directory
            known.append(Path(default_state_directory()).absolute() / "coordinator.sock")
        return "" if path in known else f"--coordinator {shlex.quote(f'unix:{path}')}"


def load_config(path: Path | None, **flags: object) -> CoordinatorConfig:
    """Reads the settings file. Flags override its settings.

    Args:
        path: The file. None: the system's file, if it exists.
        flags: Settings by name. None: not given.

    Raises:
        StartError: The file can't be read, or a setting is invalid.
    """
    file = path or (SYSTEM_FILE if SYSTEM_FILE.exists() else None)
    config = CoordinatorConfig() if file is None else _read(file)
    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        if value == "":
            raise StartError(f"--{name.replace('_', '-')} is empty: give a value, or leave it out")
    config = msgspec.structs.replace(config, **given)
    if not config.state_dir:  # it would be the present directory
        raise StartError("state_dir is empty: give a path, or leave it out")
    for address in (
        config.listen,
        config.worker_listen,
        *filter(
            None,
            [
                config.join_listen,
                config.oidc_listen,
                config.health_listen,
                config.metrics_address,
                config.web,
            ],
        ),
    ):
        host, _, port = address.rpartition(":")
        is_broken = not host or host.startswith("[") != host.endswith("]")
        if is_broken or not port.isdecimal() or int(port) > 65535:
            raise StartError(f"the address {address!r} is not HOST:PORT: write it like {DEFAULT_LISTEN}")
    if config.log_level not in LOG_LEVELS:
        raise StartError(f"unknown log level {config.log_level!r}: give one of {', '.join(LOG_LEVELS)}")
    for name, (least, most, unit) in _RANGES.items():
        if not least <= getattr(config, name) <= most:
            raise StartError(
                f"{name} {getattr(config, name):g} is out of range: give {least:g} to {most:.0f}{unit}"
            )
    if config.audit_file and not Path(config.audit_file).is_absolute():
        raise StartError(f"audit_file {config.audit_file!r} is not absolute: write it from / on")
    for name in config.server_names:
        if not DNS_NAME.fullmatch(name) and not _is_address(name):
            raise StartError(
                f"server_names has {name[:300]!r}, which is not a DNS name or an IP address: write it "
                "without port, brackets or '*', and a name with other letters than ASCII as xn--…"
            )
    _check_certificates(config)
    _check_oidc(config)
    return config


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text  # certificates have no zones


def _check_oidc(config: CoordinatorConfig) -> None:
    if config.oidc is None or not config.oidc_listen:
        if config.oidc is not None or config.oidc_listen:
            raise StartError("oidc_listen and the table oidc need each other: give both or none")
        return
    if not config.oidc.issuer or not config.oidc.audience:
        raise StartError("oidc.issuer or oidc.audience is empty: give what the tokens have as iss and aud")
    if config.oidc.prefix and not NAME.fullmatch(config.oidc.prefix):
        raise StartError(f"oidc.prefix {config.oidc.prefix!r} can't begin a name: a name has {NAME_RULE}")
    if bool(config.oidc.jwks_url) == bool(config.oidc.jwks_file):
        raise StartError("oidc needs jwks_url or jwks_file: give one of them")
    if config.oidc.jwks_url:
        try:
            check_url(config.oidc.jwks_url)
        except ValueError as error:
            raise StartError(f"oidc.jwks_url: {error}") from None
    for text, role in config.oidc.roles.items():
        if role not in ROLES:
            raise StartError(f"oidc.roles maps {text!r} to {role!r}: give one of {', '.join(ROLES)}")
    if config.oidc.roles and not config.oidc.role_claim:
        raise StartError("oidc.roles needs oidc.role_claim: name the claim with the texts")


def _check_certificates(config: CoordinatorConfig) -> None:
    files = (config.tls_certificate, config.tls_key, config.tls_client_ca)
    if any(files) and not all(files):
        raise StartError("tls_certificate, tls_key and tls_client_ca belong together: give all, or none")
    if all(files) and (config.join_listen or config.insecure):
        raise StartError(
            "with tls_certificate the coordinator signs no certificate, so nobody can enrol, and all is "
            "encrypted: leave out join_listen and insecure"
        )
    if config.insecure and config.join_listen:
        raise StartError(
            "with insecure nobody is asked for a certificate, so nobody needs to enrol: leave out join_listen"
        )
    if not TRUST_DOMAIN.fullmatch(config.trust_domain):
        raise StartError(
            f"trust_domain {config.trust_domain[:100]!r} is not a domain: give 1 to 255 lower-case letters, "
            "digits, '-' or '.', and a letter or digit first"
        )
    for name in ("ca_life_days", "server_certificate_days", "client_certificate_days"):
        days: float = getattr(config, name)
        if not 0 < days <= LIFE_LIMIT_DAYS:
            raise StartError(
                f"{name} {days:g} is out of range: give more than 0 and at most {LIFE_LIMIT_DAYS} days"
            )


def _content(path: Path) -> bytes:
    """The content of a settings file, without a byte order mark.

    Raises:
        OSError: The file can't be read, is too large, or is not a regular file. Reading a pipe may never end.
    """
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        data = file.read(FILE_LIMIT_BYTES + 1)
    if len(data) > FILE_LIMIT_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {FILE_LIMIT_BYTES} bytes")
    return data.removeprefix(codecs.BOM_UTF8)


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


def _read(path: Path) -> CoordinatorConfig:
    try:
        document = msgspec.toml.decode(_content(path), type=dict[str, Any])
        require_known(path, document, CoordinatorConfig.__struct_fields__)
        require_no_nul(path, document)
        if isinstance(oidc := document.get("oidc"), dict):
            require_known(path, oidc, OidcSettings.__struct_fields__, "oidc")
        return msgspec.convert(document, CoordinatorConfig)
    except OSError as error:
        raise StartError(
            f"the configuration {path} can't be read: {error.strerror}; give another with --config"
        ) from error
    except msgspec.ValidationError as error:
        raise StartError(f"the configuration {path} has an invalid value of {explain(error)}") from error
    except UnicodeDecodeError as error:
        raise StartError(
            f"the configuration {path} is not UTF-8 (byte {error.start + 1}): write it as UTF-8"
        ) from error
    except msgspec.DecodeError as error:
        raise StartError(f"the configuration {path} is malformed: {error}") from error
