"""Subcommands of other packages, listed without importing those packages."""

from importlib.util import find_spec
from typing import Final, NamedTuple


class Plugin(NamedTuple):
    """A subcommand of another package.

    Attributes:
        summary: Text of ``leasehold --help``, the beginning of the subcommand's own help.
        place: The subcommand as MODULE:NAME.
        extra: The extra with the packages of the subcommand.
    """

    summary: str
    place: str
    extra: str


PLUGINS: Final = {
    "backup": Plugin(
        "Back up the store and the keys of this host's coordinator, and restore them.",
        "leasehold_coordinator.server.backup_verb:command",
        "coordinator",
    ),
    "coordinator": Plugin(
        "Run the coordinator, the server for workers and clients.",
        "leasehold_coordinator.server.cli:command",
        "coordinator",
    ),
    "doctor": Plugin(
        "Check this GPU host: every precondition, each ok or with its remedy.",
        "leasehold_worker.diagnostics.doctor_verb:command",
        "worker",
    ),
    "simgpu": Plugin(
        "Simulated GPU hosts: run CUDA programs and the worker on a machine without a GPU.",
        "leasehold_simgpu.cli:command",
        "simgpu",
    ),
    "validate": Plugin(
        "Suspend, restore and move a built-in program on this host's GPUs, and verify each step.",
        "leasehold_worker.diagnostics.validate_verb:command",
        "worker",
    ),
    "worker": Plugin("Run the worker agent of a GPU host.", "leasehold_worker.agent.cli:command", "worker"),
}

MODULES: Final = {
    "coordinator": (
        "aiohttp",
        "alembic",
        "cryptography",
        "grpc_health",
        "grpc_reflection",
        "prometheus_client",
        "jwt",
        "sqlalchemy",
        "structlog",
        "uvloop",
    ),
    "simgpu": (),
    "worker": ("cryptography", "cuda", "grpc_health", "pynvml", "prometheus_client", "structlog", "trio"),
}
"""Top-level modules of each extra. Reading them from package metadata would double the time of ``--help``."""


def missing_module(plugin: Plugin) -> str | None:
    """A required module that is not installed, or None."""
    package = plugin.place.partition(".")[0]
    return next((name for name in (package, *MODULES[plugin.extra]) if find_spec(name) is None), None)
