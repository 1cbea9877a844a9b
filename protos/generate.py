"""Generates the committed Python of the protos, or checks that it is what the protos say.

``python protos/generate.py`` writes ``protos/gen``; with ``--check`` it writes nothing, and exits with 1
where the committed code differs.
"""

import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
GENERATED = PROTOS / "gen"


def generate(destination: Path) -> None:
    """Writes the messages, stubs and services of every proto below ``destination``."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("leasehold/v1/*.proto"))
    programs = Path(sys.executable).parent
    arguments = [
        "protoc",
        f"--proto_path={PROTOS}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={destination}",
        f"--grpc_python_out={destination}",
        f"--plugin=protoc-gen-mypy={programs / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={programs / 'protoc-gen-mypy_grpc'}",
        f"--mypy_out=quiet:{destination}",
        f"--mypy_grpc_out=quiet:{destination}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc refused the protos: see its message above")
    (destination / "leasehold/py.typed").touch()
    (destination / "leasehold/__init__.py").touch()
    (destination / "leasehold/v1/__init__.py").touch()


def differences(fresh: Path) -> list[str]:
    """Names the generated files that are missing, superfluous or different in the checkout."""

    def names(root: Path) -> set[str]:
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.suffix in {".py", ".pyi"}}

    committed, wanted = names(GENERATED), names(fresh)
    different = [
        name for name in committed & wanted if not filecmp.cmp(GENERATED / name, fresh / name, False)
    ]
    return sorted((committed ^ wanted) | set(different))


def main() -> None:
    """Runs the command line described above."""
    if sys.argv[1:] != ["--check"]:
        generate(GENERATED)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = differences(Path(folder))
    if stale:
        raise SystemExit(f"protos/gen is not what the protos say ({', '.join(stale)}): run `make protos`")


if __name__ == "__main__":
    main()
