"""Credentials of a fleet over mutual TLS: its user has a certificate, and its workers join by tokens."""

import functools
import grp
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

import pytest
from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold_client.config import state_directory
from leasehold_coordinator.storage.rows import binding_row
from leasehold_simgpu import SimulatedHost

from tests.certificates import enrol, write_rows
from tests.worker.unix_users import ALICE_UID, as_user, is_readable, open_to_others, share

GROUP: Final = grp.getgrgid(1)
"""The group of programs, which may use the worker's socket: to serve kernels, for instance."""


@functools.cache
def why_not() -> str:
    """Why no fleet can be enrolled here. Empty: one can."""
    if os.geteuid() != 0 or not is_readable():
        return "a workload of an enrolled user runs as a Unix user of its own, which needs root"
    return ""


def local_only(reason: str) -> pytest.MarkDecorator:
    """Plays a test with local tokens only.

    Args:
        reason: Why the test is not played over mutual TLS too.
    """
    assert reason
    return pytest.mark.parametrize("is_mutual", [pytest.param(False, id="local")], indirect=True)


@final
class MutualTls:
    """The certificate of the user ``tester``, who is an admin, and what workers of the fleet need.

    Args:
        folder: A folder for the files.
        database: The store, which no coordinator serves yet.
    """

    def __init__(self, folder: Path, database: Path) -> None:
        self._folder = folder
        (user,) = enrol(database, state_directory(), "user/tester")
        binding = RoleBinding(identity="user/tester", role=access_service_pb2.ROLE_ADMIN)
        write_rows(database, binding_row(binding))
        user.write(self._client_directory, "client")
        self._settings_file.write_text('server_names = ["localhost"]\n')

    @property
    def coordinator_options(self) -> list[str]:
        """Options of the coordinator, whose join tokens name the host by its settings."""
        return ["--join-listen", "0.0.0.0:0", "--config", str(self._settings_file)]

    @property
    def client_variables(self) -> dict[str, str]:
        """Variables by which clients present the user's certificate."""
        return {"LEASEHOLD_CREDENTIALS": str(self._client_directory)}

    @property
    def _client_directory(self) -> Path:
        return self._folder / "tester-credentials"

    @property
    def _settings_file(self) -> Path:
        return self._folder / "coordinator.toml"

    def worker_settings(self, settings: str) -> str:
        """The settings of a worker, which runs programs as another user. Tests adopt processes of root."""
        own = f'run_as = "{ALICE_UID}:{GROUP.gr_gid}"\nsocket_group = "{GROUP.gr_name}"\n'
        if "adopt_users" not in settings:
            own += 'adopt_users = ["root"]\n'
        return own + settings

    @property
    def program_user(self) -> list[str]:
        """The wrapper that starts a command as the user of the fleet's programs."""
        return as_user(ALICE_UID)

    def host_variables(self, name: str, host: SimulatedHost) -> dict[str, str]:
        """The variables of a worker's host, whose files that user can use."""
        open_to_others(self._folder)
        files = self._folder / f"{name}-files"
        if not files.exists():
            return share(host, files)
        return {**host.environment(), "LD_LIBRARY_PATH": str(files / "lib")}


@contextmanager
def variables_set(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables of this process within the context."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
