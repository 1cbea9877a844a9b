"""The synchronous client is generated from the asynchronous one, and both have the same methods."""

import inspect
import subprocess
import sys
from pathlib import Path

from leasehold_client import AsyncClient, Client

ROOT = Path(__file__).resolve().parents[3]


def public(kind: type) -> dict[str, list[str]]:
    """The parameters of each public method."""
    return {
        name: list(inspect.signature(method).parameters)
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


def test_both_clients_have_the_same_methods() -> None:
    assert public(AsyncClient) == public(Client)


def test_the_committed_client_is_the_generated_one() -> None:
    arguments = [sys.executable, "client/generate.py", "--check"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_that_was_edited_by_hand_is_named(tmp_path: Path) -> None:
    package = tmp_path / "leasehold_client"
    for folder in ("aio", "coordinator"):
        (package / folder).mkdir(parents=True)
        for path in (ROOT / "client/leasehold_client" / folder).glob("*.py"):
            (package / folder / path.name).write_text(path.read_text())
    (tmp_path / "generate.py").write_text((ROOT / "client/generate.py").read_text())
    edited = package / "coordinator/reader.py"
    edited.write_text(f"{edited.read_text()}\n# by hand\n")
    arguments = [sys.executable, str(tmp_path / "generate.py"), "--check"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "reader.py" in done.stderr
