"""Messages without the values of secret variables. Pure."""

from leasehold.v1.workload_pb2 import WorkloadSpec
from leasehold.worker.v1.session_pb2 import CommandSpec


def blank_secrets(spec: WorkloadSpec) -> None:
    """Empties the values of secret variables in place. The names stay."""
    for name in list(spec.secret_environment):  # a map must not change during its iteration
        spec.secret_environment[name] = ""


def without_secrets(command: CommandSpec) -> CommandSpec:
    """A command without values of secret variables: the same one if it has none."""
    if not command.operation.run.spec.secret_environment:
        return command
    copy = CommandSpec()
    copy.CopyFrom(command)
    blank_secrets(copy.operation.run.spec)
    return copy
