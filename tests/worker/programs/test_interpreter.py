"""Children of ours that run a module, and where they import from."""

import re
import subprocess
from pathlib import Path

import pytest
from leasehold_simgpu import SimulatedHost
from leasehold_worker.driver.helper_pool import open_driver
from leasehold_worker.hooks import hook_child
from leasehold_worker.programs import shim
from leasehold_worker.programs.interpreter import module_command

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("client", "coordinator", "simgpu", "web", "worker")
MODULE = re.compile(r'sys\.executable,([^\]\n]*?)"-m"')


def test_no_module_is_started_with_imports_from_the_working_directory() -> None:
    found = {
        (path.name, options)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for options in MODULE.findall(path.read_text())
    }
    assert found
    assert {options.strip() for _, options in found} == {'"-P",'}, found


async def test_the_driver_helper_imports_nothing_from_the_working_directory(
    host: SimulatedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "working-directory"
    folder.mkdir()
    for name in ("msgspec", "uuid", "cuda", "leasehold_worker"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\n")
    monkeypatch.chdir(folder)
    async with open_driver() as driver:
        assert driver.unavailable_reason is None
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize("module", [shim.__name__, hook_child.__name__])
def test_the_search_of_a_program_imports_nothing(module: str) -> None:
    """The user of the program may not be permitted to read Python's files."""
    *interpreter, code = module_command(module)
    loading = code.replace(" import main; main()", " import main")
    search = "import os; known = set(sys.modules); os.get_exec_path({b'PATH': b'/bin'})"
    shown = "print(*set(sys.modules) - known)"
    command = [*interpreter, f"{loading}; {search}; {shown}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "\n"
