"""``leasehold backup``: backups of this host's coordinator."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from leasehold_coordinator.log_format import printable

if TYPE_CHECKING:
    from leasehold_coordinator.server.config import CoordinatorConfig

NAMED: Final = 8
"""Most files that a message names."""

EPILOG = """\b
Examples:
  leasehold backup create /srv/backups/leasehold.tar.gz
  leasehold backup restore /srv/backups/leasehold.tar.gz
"""


@click.group(name="backup", epilog=EPILOG)
def command() -> None:
    """Back up the store and the keys of this host's coordinator, and restore them.

    Run the verbs as the coordinator's user, with the coordinator's settings.
    """


class _GivenPath(click.Path):
    """A path. Empty text would be the working directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuses empty text."""
        if value == "":
            self.fail("the value is empty: give one", param, ctx)
        return super().convert(value, param, ctx)


def settings(function: Callable[..., None]) -> Callable[..., None]:
    """The options that name a coordinator's files."""
    options = (
        click.option(
            "--config",
            "config_path",
            type=_GivenPath(path_type=Path),
            envvar="LEASEHOLD_COORDINATOR_CONFIG",
            help="The coordinator's settings.  [default: /etc/leasehold/coordinator.toml, if it exists]",
        ),
        click.option(
            "--database",
            metavar="PATH",
            envvar="LEASEHOLD_DATABASE",
            help="SQLite file of the store.  [default: coordinator.sqlite3 in the state directory]",
        ),
        click.option(
            "--state-dir",
            metavar="DIRECTORY",
            envvar="LEASEHOLD_COORDINATOR_STATE_DIR",
            help="Directory of keys, tokens and the store.  [default: ~/.local/state/leasehold]",
        ),
        click.argument("file", type=_GivenPath(path_type=Path)),
    )
    for option in options:
        function = option(function)
    return function


@command.command()
@settings
def create(file: Path, config_path: Path | None, **flags: str | None) -> None:
    """Write a backup to FILE, a new file that only you may read.

    The coordinator may serve meanwhile. The backup holds the key of the certificate authority: whoever
    reads it can make certificates of any worker and user.
    """
    from leasehold_coordinator.server import backup

    config = _config(config_path, flags)
    state_directory = Path(config.state_dir)
    with _refusals():
        manifest = backup.create(state_directory, config.store, file)
        size_mib = file.stat().st_size / 2**20
        left_out = backup.files_left_out(state_directory, _named_files(config_path, config))
    _print(f"{file}: {len(manifest.files)} files, {size_mib:.1f} MiB, {_stored(manifest.last_commit)}")
    if left_out:
        _print(
            "leasehold backup: the backup lacks these files of the settings in the state directory: "
            f"{', '.join(f'{name} {path}' for name, path in left_out.items())}; copy these files by "
            "hand, and the numbered older files of an audit_file",
            err=True,
        )


@command.command()
@settings
def restore(file: Path, config_path: Path | None, **flags: str | None) -> None:
    """Unpack the backup FILE into a state directory without files of a coordinator.

    Nothing is overwritten. All other files in the directory stay as they are, such as those of a worker.

    Start the coordinator with --store-restored afterwards: workers know later sessions than the backup.
    """
    from leasehold_coordinator.server import backup

    config = _config(config_path, flags)
    state_directory = Path(config.state_dir)
    with _refusals():
        manifest, left_out = backup.restore(file, state_directory, config.store)
    _print(
        f"{state_directory}: {len(manifest.files) - len(left_out)} files of {manifest.made_at}, "
        f"{_stored(manifest.last_commit)}; start the coordinator with --store-restored"
    )
    if left_out:
        more = f" and {len(left_out) - NAMED} more" if len(left_out) > NAMED else ""
        _print(
            "leasehold backup: a backup has only the store, the keys, the certificates and the tokens, so "
            f"these files of the archive were not restored: {', '.join(left_out[:NAMED])}{more}; copy files "
            "that the settings name by hand",
            err=True,
        )


def _print(text: str, *, err: bool = False) -> None:
    """Prints a line. Names of files may hold terminal codes."""
    click.echo(printable(text), err=err)


def _stored(last_commit: int | None) -> str:
    if last_commit is None:
        return "without the store, which is on a database server: back it up with the server's own tools"
    return f"the store up to commit {last_commit}"


def _config(config_path: Path | None, flags: dict[str, Any]) -> CoordinatorConfig:
    from leasehold_coordinator.server.config import load_config

    with _refusals(code=2):
        return load_config(config_path, **flags)


def _named_files(config_path: Path | None, config: CoordinatorConfig) -> dict[str, str]:
    """The files that the settings name, and the file of the settings, by their names. Empty: no file."""
    names = ("tls_certificate", "tls_key", "tls_client_ca", "audit_file")
    return {
        "--config": str(config_path or ""),
        **{name: getattr(config, name) for name in names},
        "oidc.jwks_file": config.oidc.jwks_file if config.oidc is not None else "",
    }


@contextmanager
def _refusals(code: int = 1) -> Iterator[None]:
    """Prints why a verb failed, and exits. The code 2 is for options and settings."""
    from leasehold_coordinator.errors import StartError

    os.umask(0o077)
    try:
        yield
    except StartError as error:
        _print(f"leasehold backup: {error}", err=True)
        sys.exit(code)
    except OSError as error:
        what = f"{error.filename or 'a file'}: {error.strerror or error}"
        _print(f"leasehold backup: {what}: check the directory, its space and its permissions", err=True)
        sys.exit(code)
