"""Builds the GPU kit: one archive with which a host without network reports how Leasehold works on its GPUs.

The archive holds the files that git tracks, the command `gpu_report`, and the packages that the report needs
for one version of Python, Leasehold among them, as they lie in a `site-packages`. They are unpacked from
the pinned and hashed wheels of `requirements.txt`, because an archive of unpacked files is a third smaller
than one of wheels. Neither the CUDA toolkit nor PyTorch is among them: the report uses those of the host.

    python tests/gpu/kit.py --python 3.12
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parents[2]
MIB: Final = 2**20
LIMIT_BYTES: Final = 60 * MIB

NOT_NEEDED: Final = re.compile(
    r"ast-serialize|babel|backrefs|buf-bin|certifi|charset-normalizer|colorama|cuda-python|editables|execnet"
    r"|ghp-import|greenlet|griffelib|grimp|grpcio-tools|hatchling|hypothesis|import-linter|importlib-resources"
    r"|jinja2|jsonschema.*|kubernetes-validate|librt|markdown|mergedeep|mkdocs.*|mypy.*|opentelemetry-.*|paginate"
    r"|pathspec|playwright|pyee|pymdown-extensions|pytest-xdist|python-dateutil|pyyaml-env-tag|referencing"
    r"|requests|rpds-py|ruff|setuptools|six|tomlkit|trove-classifiers|types-.*|tzdata|urllib3|watchdog"
)
"""Developers' tools, and cuda-python: an empty package that stands for cuda-bindings and cuda-core."""

PLATFORMS: Final = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in range(5, 29)))
"""glibc up to 2.28, which Debian 10, Ubuntu 20.04 and RHEL 8 have. pip takes each name for itself alone."""


class KitError(Exception):
    """The archive can't be built."""


def requirements(python: str) -> Iterator[str]:
    """The pinned requirements of the report, with their hashes.

    pip evaluates markers for the Python that it runs on, so they are evaluated here.
    """
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    text = (ROOT / "requirements.txt").read_text()
    for block in re.findall(r"^\S.*(?:\n    --hash.*)*", text, re.MULTILINE):
        pin, *hashes = block.replace(" \\", "").splitlines()
        requirement = Requirement(pin)
        if NOT_NEEDED.fullmatch(requirement.name):
            continue
        if requirement.marker is None or requirement.marker.evaluate(environment):
            yield " ".join([f"{requirement.name}{requirement.specifier}", *map(str.strip, hashes)])


def download(python: str, folder: Path) -> None:
    """Downloads the wheels of the requirements into a folder."""
    pins = folder.with_suffix(".txt")
    pins.write_text("\n".join(requirements(python)) + "\n")
    target = [
        "--implementation=cp",
        f"--python-version={python}",
        *(f"--platform={name}" for name in PLATFORMS),
    ]
    pip(
        "download",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        *target,
        f"--dest={folder}",
        f"-r{pins}",
    )


def pip(*arguments: str) -> None:
    """Runs the pip of this Python."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise KitError(f"pip {arguments[0]} failed:\n{done.stdout}")


def unpack(wheels: Path, packages: Path) -> None:
    """Unpacks wheels. Fails on one with files for other places than site-packages."""
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            if any(".data/" in name for name in archive.namelist()):
                raise KitError(f"{wheel.name} has a .data folder, which unpacking does not install")
            archive.extractall(packages)


def copy_tracked_files(folder: Path) -> None:
    """Copies the files that git tracks, as they are in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)


def revision() -> str:
    """The commit, with `+` behind it where the working tree differs."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return described.stdout.strip()


def build(python: str, output: Path) -> Path:
    """Builds the archive, and returns where it is.

    Raises:
        KitError: A wheel is missing for that Python, or the archive is larger than 60 MiB.
    """
    name = f"leasehold-gpu-kit-py{python}"
    with tempfile.TemporaryDirectory() as temporary:
        kit = Path(temporary) / name
        wheels = Path(temporary) / "wheels"
        copy_tracked_files(kit)
        download(python, wheels)
        # A copy: the build leaves files beside the sources.
        sources = shutil.copytree(kit, Path(temporary) / "sources")
        pip("wheel", "--no-deps", "--no-build-isolation", f"--wheel-dir={wheels}", str(sources))
        unpack(wheels, kit / "packages")
        (kit / "REVISION").write_text(revision() + "\n")
        command = kit / "gpu_report"
        command.write_text((ROOT / "tests/gpu/gpu_report.sh").read_text().replace("@PYTHON@", python))
        command.chmod(0o755)
        output.mkdir(parents=True, exist_ok=True)
        archive = output / f"{name}.tar.xz"
        with tarfile.open(archive, "w:xz") as tar:
            tar.add(kit, arcname=name, filter=without_owner)
        check_size(archive, wheels)
    return archive


def check_size(archive: Path, wheels: Path) -> None:
    """Deletes an archive that is too large, and fails."""
    size = archive.stat().st_size
    if size <= LIMIT_BYTES:
        return
    archive.unlink()
    largest = sorted(wheels.iterdir(), key=lambda wheel: wheel.stat().st_size, reverse=True)[:5]
    raise KitError(
        f"the archive has {size / MIB:.1f} MiB, and at most {LIMIT_BYTES // MIB} MiB are allowed. "
        f"Leave more out in NOT_NEEDED. The largest wheels: {', '.join(wheel.name for wheel in largest)}"
    )


def without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file of the archive without the names of who built it."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument(
        "--python", default=running, metavar="X.Y", help=f"version of the GPU host ({running})"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="DIR", help="folder (dist)")
    options = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", options.python):
        parser.error(f"--python {options.python}: give a version such as 3.12")
    try:
        archive = build(options.python, options.output)
    except KitError as error:
        sys.exit(f"gpu-kit: {error}")
    print(f"{archive}: {archive.stat().st_size / MIB:.1f} MiB, for Python {options.python} on x86-64 Linux")


if __name__ == "__main__":
    main()
