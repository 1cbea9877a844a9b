"""The release before the present one: a real checkout of the last commit before upgrades were promised."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
OLDER: Final = "7d56d20f"


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


needs_older_release = pytest.mark.skipif(
    shutil.which("git") is None or _git("cat-file", "-e", f"{OLDER}^{{commit}}").returncode != 0,
    reason=f"no checkout of git with the commit {OLDER}",
)


def unpack_older(folder: Path) -> Path:
    """Unpacks the older release into a folder, and returns the folder."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["tar", "-x", "-C", str(folder)], input=_git("archive", OLDER).stdout, check=True)
    return folder
