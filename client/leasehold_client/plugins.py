"""The subcommands that other packages add, found without importing any of these packages."""

from importlib.util import find_spec
from typing import Final, NamedTuple


class Room(NamedTuple):
    """A subcommand of another package.

    Attributes:
        summary: What ``leasehold --help`` says of the subcommand.
        place: Where the subcommand is, as MODULE:NAME.
        extra: The extra whose packages the subcommand needs.
    """

    summary: str
    place: str
    extra: str


ROOMS: Final = {
    "coordinator": Room(
        "Run the coordinator, to which workers connect and clients talk.",
        "leasehold_coordinator.cli:command",
        "coordinator",
    ),
    "doctor": Room(
        "Check this GPU host: every precondition, each ok or with its remedy.",
        "leasehold_worker.diagnostics.doctor_verb:command",
        "worker",
    ),
    "simgpu": Room(
        "Simulated GPU hosts: run CUDA programs and the worker on a machine without a GPU.",
        "leasehold_simgpu.cli:command",
        "simgpu",
    ),
    "validate": Room(
        "Suspend, restore and move a built-in program on this host's GPUs, and prove each step.",
        "leasehold_worker.diagnostics.validate_verb:command",
        "worker",
    ),
    "worker": Room("Run the worker agent of a GPU host.", "leasehold_worker.agent.cli:command", "worker"),
}

MODULES: Final = {
    "coordinator": ("alembic", "grpc_health", "grpc_reflection", "sqlalchemy", "uvloop"),
    "simgpu": (),
    "worker": ("cuda", "pynvml", "trio"),
}
"""What the packages of each extra are imported as. The metadata of these packages would take as long to read
as everything else that ``leasehold --help`` does."""


def missing_module(room: Room) -> str | None:
    """A module that the subcommand needs and that is not installed. None: all are."""
    package = room.place.partition(".")[0]
    return next((name for name in (package, *MODULES[room.extra]) if find_spec(name) is None), None)
