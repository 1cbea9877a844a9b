"""The manifests of deploy/kubernetes, as files and as objects."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias, cast

import yaml

FOLDER: Final = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
BASE: Final = FOLDER / "base"
KUSTOMIZATION: Final = "kustomization.yaml"

Value: TypeAlias = "Mapping[str, Value] | Sequence[Value] | str | int | bool | None"


@dataclass(frozen=True, slots=True)
class Object:
    """One object of Kubernetes, or a part of one."""

    value: Value

    def __getitem__(self, key: str | int) -> "Object":
        """A field, or an element of a list."""
        if isinstance(key, int):
            return Object(cast("Sequence[Value]", self.value)[key])
        return Object(cast("Mapping[str, Value]", self.value)[key])

    def __iter__(self) -> Iterator["Object"]:
        """The elements of a list."""
        return (Object(one) for one in cast("Sequence[Value]", self.value))

    def get(self, key: str) -> "Object":
        """A field that may be missing. Its elements are then none."""
        return Object(cast("Mapping[str, Value]", self.value).get(key, []))

    @property
    def name(self) -> tuple[str, str]:
        """Kind and name."""
        return str(self["kind"].value), str(self["metadata"]["name"].value)


@cache
def objects(text: str) -> tuple[Object, ...]:
    """The objects of a file with one or more documents."""
    return tuple(Object(document) for document in yaml.safe_load_all(text))


def kustomizations() -> list[Path]:
    """The folders with a kustomization."""
    return sorted(path.parent for path in FOLDER.rglob(KUSTOMIZATION))


def resource_files(folder: Path) -> list[Path]:
    """The files of objects that a kustomization names."""
    (kustomization,) = objects((folder / KUSTOMIZATION).read_text())
    places = [(folder / str(one.value)).resolve() for one in kustomization.get("resources")]
    return [place for place in places if place.is_file()]


def named_files(folder: Path) -> list[Path]:
    """What a kustomization names: files, and folders of other kustomizations."""
    (kustomization,) = objects((folder / KUSTOMIZATION).read_text())
    names = [str(one.value) for one in kustomization.get("resources")]
    names += [str(patch["path"].value) for patch in kustomization.get("patches")]
    for generator in kustomization.get("configMapGenerator"):
        names += [str(one.value) for one in generator["files"]]
    return [(folder / name).resolve() for name in names]


def resources(folder: Path) -> list[Object]:
    """The objects of a kustomization and of those below it, before patches."""
    (kustomization,) = objects((folder / KUSTOMIZATION).read_text())
    found: list[Object] = []
    for one in kustomization.get("resources"):
        place = (folder / str(one.value)).resolve()
        found += resources(place) if place.is_dir() else objects(place.read_text())
    return found


def find(kind: str, name: str) -> Object:
    """An object of the base. Both namespaces have a NetworkPolicy of the same name: the first one counts."""
    return next(one for one in resources(BASE) if one.name == (kind, name))


def pod(manifest: Object) -> Object:
    """The specification of an object's pods."""
    return manifest["spec"]["template"]["spec"]
