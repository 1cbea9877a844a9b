"""Certificates of a fleet whose workers and user are enrolled, instead of tokens on loopback."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, final

from leasehold.v1 import access_service_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold_client.config import state_directory
from leasehold_coordinator.storage.rows import binding_row
from leasehold_simgpu import SimulatedHost

from tests.certificates import enrol, write_rows
from tests.worker.unix_users import ALICE_UID, is_readable, open_to_others, share

TRANSPORT: Final = "LEASEHOLD_TEST_TRANSPORT"
"""With the value ``mutual-tls``, fleets have certificates. See test_mutual_tls.py."""

WORKERS: Final = ("alpha", "beta", "gamma")


def is_wanted() -> bool:
    """Whether this run's fleets are to have certificates."""
    return os.environ.get(TRANSPORT) == "mutual-tls"


def why_not() -> str:
    """Why no fleet can be enrolled here. Empty: one can."""
    if os.geteuid() != 0 or not is_readable():
        return "a workload of an enrolled user runs as a Unix user of its own, which needs root"
    return ""


@final
class MutualTls:
    """The certificates of the user ``tester``, who is an admin, and of three workers.

    Args:
        folder: A folder for the files.
        database: The store, which no coordinator serves yet.
    """

    def __init__(self, folder: Path, database: Path) -> None:
        self._folder = folder
        names = (f"worker/{name}" for name in WORKERS)
        user, *workers = enrol(database, state_directory(), "user/tester", *names)
        binding = RoleBinding(identity="user/tester", role=access_service_pb2.ROLE_ADMIN)
        write_rows(database, binding_row(binding))
        user.write(self.client_directory, "client")
        for name, worker in zip(WORKERS, workers, strict=True):
            worker.write(self.worker_directory(name), "worker")

    @property
    def client_directory(self) -> Path:
        """Directory of the user's certificate."""
        return self._folder / "tester-credentials"

    def worker_directory(self, name: str) -> Path:
        """Directory of a worker's certificate."""
        return self._folder / f"{name}-credentials"

    @contextmanager
    def as_user(self) -> Iterator[None]:
        """Lets this process open channels with the user's certificate."""
        before = os.environ.get("LEASEHOLD_CREDENTIALS")
        os.environ["LEASEHOLD_CREDENTIALS"] = str(self.client_directory)
        try:
            yield
        finally:
            if before is None:
                del os.environ["LEASEHOLD_CREDENTIALS"]
            else:
                os.environ["LEASEHOLD_CREDENTIALS"] = before

    def settings(self, settings: str) -> str:
        """The settings of a worker, which runs programs as another user."""
        return f'run_as = "{ALICE_UID}:{ALICE_UID}"\n{settings}'

    def host_variables(self, name: str, host: SimulatedHost) -> dict[str, str]:
        """The variables of a worker's host, whose files that user can use."""
        open_to_others(self._folder)
        files = self._folder / f"{name}-files"
        if not files.exists():
            return share(host, files)
        return {**host.environment(), "LD_LIBRARY_PATH": str(files / "lib")}
