"""The user's configuration of the command line."""

import os
from pathlib import Path

import msgspec

from leasehold_client.errors import UsageError


class ClientConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of ``cli.toml``."""

    coordinator: str = "127.0.0.1:7400"
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
        raise UsageError(f"the configuration {path} can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration {path} is not valid: {error}") from error
