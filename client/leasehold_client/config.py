"""The user's configuration of the command line."""

import os
from pathlib import Path
from typing import Final

import msgspec

from leasehold_client.errors import UsageError

DEFAULT_COORDINATOR: Final = "127.0.0.1:7400"


class ClientConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of ``cli.toml``."""

    coordinator: str = DEFAULT_COORDINATOR
    """Address of the coordinator, HOST:PORT."""


def config_path() -> Path:
    """Where the file is, if there is one."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "leasehold/cli.toml"


def load_config() -> ClientConfig:
    """Reads the file; without one, the defaults.

    Raises:
        UsageError: The file can't be read, or breaks a rule; the text says which.
    """
    path = config_path()
    try:
        return msgspec.toml.decode(path.read_bytes(), type=ClientConfig)
    except FileNotFoundError:
        return ClientConfig()
    except OSError as error:
        raise UsageError(
            f"the configuration {path} can't be read: {error.strerror}; make it readable, or remove it"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"the configuration {path} is not valid: {error}; its only key is coordinator = 'HOST:PORT'"
        ) from error


def parse_address(text: str) -> str:
    """Checks an address of a coordinator, and returns it.

    Raises:
        UsageError: It is not HOST:PORT.
    """
    host, _, port = text.strip().rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not host or (":" in host and not bracketed) or not _is_port(port):
        raise UsageError(
            f"{text!r} is not the address of a coordinator: write HOST:PORT, such as {DEFAULT_COORDINATOR}"
        )
    return f"{host}:{port}"


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdecimal() and 0 < int(text) < 65_536
