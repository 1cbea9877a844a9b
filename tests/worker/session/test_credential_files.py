"""The worker connects again after a change of the files with its certificate, as of a PKI of others."""

from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from leasehold_client.config import credentials_directory
from leasehold_coordinator.access.certificates import ClientCertificate
from leasehold_coordinator.server.transport import open_state
from leasehold_worker.session import credential_files
from leasehold_worker.session.credential_files import look, wait_for_change

from tests.certificates import issue
from tests.ports import free_port
from tests.scrapes import scrape
from tests.worker.conftest import WorkerProcess
from tests.worker.scripted_coordinator import ScriptedCoordinator


def write(directory: Path, name: str = "worker/alpha") -> ClientCertificate:
    """Writes the files of a new certificate."""
    holder = issue(open_state(credentials_directory())[0].newest, name)
    holder.write(directory, "worker")
    return holder.issued


def test_a_change_of_the_files_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credential_files, "POLL_INTERVAL_S", 0.01)

    async def scenario() -> None:
        with trio.move_on_after(0.2) as nothing:  # there is no certificate
            await wait_for_change(tmp_path, look(tmp_path))
        assert nothing.cancelled_caught
        write(tmp_path)
        with trio.move_on_after(0.2) as unchanged:
            await wait_for_change(tmp_path, look(tmp_path))
        assert unchanged.cancelled_caught
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait_for_change, tmp_path, look(tmp_path))
            while nursery.child_tasks:
                write(tmp_path)
                await trio.sleep(0.2)

    trio.run(scenario)


@pytest.mark.long
def test_a_session_goes_on_with_changed_files(
    start_worker: Callable[..., WorkerProcess], coordinator: ScriptedCoordinator, tmp_path: Path
) -> None:
    directory = tmp_path / "credentials"
    write(directory)
    address = f"127.0.0.1:{free_port()}"
    worker = start_worker(None, credentials=str(directory), metrics_listen=address)
    coordinator.next_session()
    issued = write(directory)
    coordinator.next_session()
    assert "the files of the certificate have changed" in worker.log.read_text()
    seen = scrape(address)
    for bound, time_of_bound in (("not_before", issued.not_before), ("expiry", issued.not_after)):
        name = f"leasehold_worker_certificate_{bound}_timestamp_seconds"
        assert seen.value(name) == time_of_bound.timestamp()
