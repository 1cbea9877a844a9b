"""A rotation of the CA with a real worker, which stores both authorities while its session goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleets import Fleet, make_fleet
from tests.integration.test_enrolment import SETTINGS, join, set_directories

pytestmark = pytest.mark.long


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A coordinator that other hosts reach, with directories of its own."""
    with pytest.MonkeyPatch.context() as patch:
        set_directories(tmp_path, patch)
        settings = tmp_path / "coordinator.toml"
        settings.write_text(SETTINGS)
        listen = ("--listen", "0.0.0.0:0", "--worker-listen", "0.0.0.0:0", "--config", str(settings))
        with make_fleet(tmp_path, *listen) as started:
            started.address = f"unix:{tmp_path / 'store.sock'}"
            yield started


def authorities(fleet: Fleet) -> list[dict[str, Any]]:
    """The authorities, as the command line lists them."""
    found: list[dict[str, Any]] = json.loads(fleet.cli("ca", "list", "-o", "json").stdout)["authorities"]
    return found


def trusted(fleet: Fleet, name: str) -> int:
    """The number of authorities that a worker trusts."""
    kept = json.loads((fleet.folder / name / "enrolment.json").read_text())
    return str(kept["authorities"]).count("BEGIN CERTIFICATE")


def test_a_worker_stores_the_authorities_and_its_session_goes_on(fleet: Fleet) -> None:
    join(fleet, "gpu-01")
    fleet.run_counter("one", "gpu-01")
    assert trusted(fleet, "gpu-01") == 1
    fleet.cli("ca", "rotate")
    fleet.wait(lambda: trusted(fleet, "gpu-01") == 2)
    fleet.wait(lambda: bool(authorities(fleet)[1].get("signs_server")))
    fleet.wait_counting("one")
    assert fleet.log("gpu-01").count("connected to") == 1
    fleet.cli("stop", "one")
    fleet.end("gpu-01")
    fleet.join_worker("gpu-01")
    fleet.wait(lambda: fleet.log("gpu-01").count("connected to") == 2)
