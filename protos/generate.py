"""Generates the Python and the reference of the protos, or checks that the committed ones are up to date.

``python protos/generate.py`` writes ``protos/gen``, docs/reference/api.md, and the messages of CRIU beside
their proto. With ``--check`` it writes nothing, and exits with 1 where the committed code differs.
"""

import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc
from reference import page

PROTOS = Path(__file__).resolve().parent
GENERATED = PROTOS / "gen"
ROOT = PROTOS.parent
CRIU = Path("leasehold_worker/criu/criu.proto")
"""The proto of CRIU's messages, below the folder of the worker's package."""
DESCRIPTORS = "leasehold/descriptors.binpb"
"""The descriptions of all messages and services, with comments and imports, below :data:`GENERATED`."""
PAGE = ROOT / "docs/reference/api.md"


def generate(destination: Path, worker: Path) -> None:
    """Writes the messages, stubs and services of every proto.

    Args:
        destination: Folder of those that rooms share.
        worker: Folder of the worker's package, which has the messages of CRIU.
    """
    shared = sorted(path.relative_to(PROTOS) for path in PROTOS.glob("leasehold/**/*.proto"))
    _compile(PROTOS, shared, destination, services=True)
    _compile(ROOT / "worker", [CRIU], worker, services=False)
    for folder in {destination / parent for path in shared for parent in path.parents}:
        if folder != destination:
            (folder / "__init__.py").touch()
    (destination / "leasehold/py.typed").touch()
    arguments = [
        "--include_imports",
        "--include_source_info",
        f"--descriptor_set_out={destination / DESCRIPTORS}",
    ]
    _protoc(PROTOS, shared, arguments)


def _compile(source: Path, protos: list[Path], destination: Path, services: bool) -> None:
    programs = Path(sys.executable).parent
    arguments = [
        f"--python_out={destination}",
        f"--plugin=protoc-gen-mypy={programs / 'protoc-gen-mypy'}",
        f"--mypy_out=quiet:{destination}",
    ]
    if services:
        arguments += [
            f"--grpc_python_out={destination}",
            f"--plugin=protoc-gen-mypy_grpc={programs / 'protoc-gen-mypy_grpc'}",
            f"--mypy_grpc_out=quiet:{destination}",
        ]
    _protoc(source, protos, arguments)


def _protoc(source: Path, protos: list[Path], arguments: list[str]) -> None:
    paths = [f"--proto_path={source}", f"--proto_path={files('grpc_tools') / '_proto'}"]
    if protoc.main(["protoc", *paths, *arguments, *map(str, protos)]) != 0:
        raise SystemExit("protoc refused the protos: see its message above")


def reference(generated: Path) -> str:
    """The text of docs/reference/api.md for the descriptors in a folder of :func:`generate`."""
    return page(FileDescriptorSet.FromString((generated / DESCRIPTORS).read_bytes()))


def differences(committed_in: Path, fresh: Path, pattern: str) -> list[str]:
    """Names the generated files that are missing, superfluous or different in the checkout."""

    def names(root: Path) -> set[str]:
        suffixes = {".py", ".pyi", ".binpb"}
        return {str(path.relative_to(root)) for path in root.rglob(pattern) if path.suffix in suffixes}

    committed, wanted = names(committed_in), names(fresh)
    different = [
        name for name in committed & wanted if not filecmp.cmp(committed_in / name, fresh / name, False)
    ]
    return sorted((committed ^ wanted) | set(different))


def main() -> None:
    """Runs the command line described above."""
    if sys.argv[1:] != ["--check"]:
        generate(GENERATED, ROOT / "worker")
        PAGE.write_text(reference(GENERATED))
        return
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        shared, worker = Path(first), Path(second)
        generate(shared, worker)
        stale = differences(GENERATED, shared, "*") + differences(ROOT / "worker", worker, "*_pb2.py*")
        stale += [str(PAGE.relative_to(ROOT))] if PAGE.read_text() != reference(shared) else []
    if stale:
        raise SystemExit(
            f"the committed code is not what the protos say ({', '.join(stale)}): run `make protos`"
        )


if __name__ == "__main__":
    main()
