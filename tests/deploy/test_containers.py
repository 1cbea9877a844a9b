"""The Containerfiles of deploy/container: what they copy exists, what they install is pinned."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.manifests import find, pod
from tests.git_checkout import ROOT, needs_git, tracked_files

NAMES: Final = ("coordinator", "worker")
USERS: Final = {"coordinator": "10400", "worker": "10401"}
DIGEST: Final = f"@sha256:{'0' * 64}"


def stages(name: str) -> list[list[tuple[str, str]]]:
    """The instructions of each stage, by name and arguments. The first list is before the first stage."""
    text = (ROOT / f"deploy/container/{name}.Containerfile").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found: list[list[tuple[str, str]]] = [[]]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        instruction, _, arguments = line.partition(" ")
        if instruction == "FROM":
            found.append([])
        found[-1].append((instruction, arguments.strip()))
    return found


def arguments(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [words for one, words in stage if one == instruction]


@pytest.mark.parametrize("name", NAMES)
def test_a_base_image_without_a_digest_is_refused(name: str) -> None:
    first, build, runtime = stages(name)
    assert first == [("ARG", "BASE")], "no default"
    assert arguments(build, "FROM") == ["${BASE} AS build"]
    assert arguments(runtime, "FROM") == ["${BASE}"]
    check = arguments(build, "RUN")[0]
    for base, code in ((f"python{DIGEST}", 0), ("python:3.12-slim", 1), ("", 1)):
        done = subprocess.run(["sh", "-c", check], env={"BASE": base}, capture_output=True, check=False)
        assert done.returncode == code
        assert (b"is not pinned: give IMAGE@sha256:DIGEST" in done.stderr) == bool(code)


@pytest.mark.parametrize("name", NAMES)
def test_the_image_has_what_the_wheel_is_made_of(name: str) -> None:
    _, build, _ = stages(name)
    copied = [source for words in arguments(build, "COPY") for source in words.split()[:-1]]
    permitted = (ROOT / ".dockerignore").read_text().splitlines()
    assert [one for one in copied if f"!{one}" not in permitted] == []
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = [*wheel["packages"], *wheel["force-include"], settings["project"]["readme"], "pyproject.toml"]
    assert [one for one in needed if not any(Path(one).is_relative_to(source) for source in copied)] == []


@needs_git
@pytest.mark.parametrize("name", NAMES)
def test_git_tracks_what_the_image_takes(name: str) -> None:
    _, build, _ = stages(name)
    copied = [source for words in arguments(build, "COPY") for source in words.split()[:-1]]
    tracked = tracked_files()
    assert [one for one in copied if not any(Path(path).is_relative_to(one) for path in tracked)] == []


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_installed_by_hash(name: str) -> None:
    _, build, runtime = stages(name)
    installs = [one for words in arguments(build, "RUN") for one in re.findall(r"pip install [^&]*", words)]
    assert len(installs) == 3
    for one in installs:
        assert "--require-hashes" in one or "--no-index --no-deps" in one
        files = re.findall(r"requirements/[a-z]+\.txt", one)
        assert all((ROOT / file).is_file() for file in files)
    assert "pip install" not in str(runtime)


@pytest.mark.parametrize("name", NAMES)
def test_the_image_is_of_a_user_without_rights(name: str) -> None:
    _, _, runtime = stages(name)
    user = USERS[name]
    assert arguments(runtime, "USER") == [f"{user}:{user}"]
    assert f"--uid {user}" in arguments(runtime, "RUN")[0]
    assert arguments(runtime, "ENTRYPOINT") == ['["leasehold"]']
    assert arguments(runtime, "CMD") == [f'["{name}"]']
    manifest = find(*{"coordinator": ("StatefulSet", name), "worker": ("DaemonSet", name)}[name])
    (container,) = pod(manifest)["containers"]
    ports = [str(port["containerPort"].value) for port in container["ports"]]
    assert arguments(runtime, "EXPOSE") == [" ".join(ports)]
    assert f"leasehold-{name}@" in str(container["image"].value)
