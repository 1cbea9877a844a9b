"""The options by which a workload says what it needs."""

import signal

import click
import pytest
from click.testing import CliRunner, Result
from leasehold.v1 import eviction_pb2, workload_pb2
from leasehold.v1.workload_pb2 import HelperTerms, Resources
from leasehold_client.cli.resource_options import helper_options, resource_options

GIB = 2**30
seen: list[tuple[Resources, HelperTerms | None]] = []


@click.command()
@resource_options
@helper_options
def verb(resources: Resources, helper: HelperTerms | None) -> None:
    """Notes what it is told."""
    seen.append((resources, helper))


def told(*options: str) -> tuple[Resources, HelperTerms | None]:
    result = CliRunner().invoke(verb, options)
    assert result.exit_code == 0, result.output
    return seen.pop()


def refused(*options: str) -> Result:
    result = CliRunner().invoke(verb, options)
    assert result.exit_code == 2
    return result


def test_nothing_is_needed_where_nothing_is_said() -> None:
    assert told() == (Resources(), None)


def test_what_is_said_is_needed() -> None:
    resources, _ = told(
        *("--gpus", "2", "--gpu-memory", "40GiB", "--gpu-name", "NVIDIA H100 80GB HBM3", "--gpu-units", "8"),
        *("--acceptable-units", "2", "--acceptable-units", "4", "--prefer", "same-numa-node"),
        *("--allow-foreign", "--cpu", "2.5", "--memory", "8GiB", "--disk", "1000"),
    )
    assert resources == Resources(
        gpu_count=2,
        gpu_memory_bytes=40 * GIB,
        gpu_name="NVIDIA H100 80GB HBM3",
        gpu_units=8,
        acceptable_gpu_units=[2, 4],
        gpu_preference=workload_pb2.GPU_PREFERENCE_SAME_NUMA_NODE,
        allow_foreign=True,
        cpu_millicores=2500,
        memory_bytes=8 * GIB,
        disk_bytes=1000,
    )


def test_what_is_not_said_is_absent_and_not_zero() -> None:
    resources, _ = told("--memory", "0")
    assert resources.HasField("memory_bytes")
    assert not any(resources.HasField(name) for name in ("disk_bytes", "gpu_name", "gpu_units"))


@pytest.mark.parametrize("name", ["USR1", "usr1", "SIGUSR1", str(int(signal.SIGUSR1))])
def test_a_helper_says_how_it_is_asked_and_what_happens_then(name: str) -> None:
    _, helper = told("--helper", "stop", "--yield-grace", "1.5", "--yield-signal", name)
    assert helper is not None
    assert helper.process_strategy == eviction_pb2.PROCESS_STRATEGY_STOP
    assert helper.grace.ToMilliseconds() == 1500
    assert helper.signal_number == signal.SIGUSR1


def test_a_helper_may_leave_all_to_its_worker() -> None:
    _, helper = told("--helper", "suspend")
    assert helper == HelperTerms(process_strategy=eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND)
    assert not helper.HasField("grace")
    assert not helper.HasField("signal_number")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("--gpus -1", "-1 is not in the range"),
        ("--gpus 4294967296", "is not in the range"),
        ("--gpu-memory 8G", "'8G' is not a size"),
        ("--memory -1GiB", "'-1GiB' is not a size"),
        ("--disk nan", "'nan' is not a size"),
        ("--gpu-units 0", "0 is not in the range"),
        ("--acceptable-units x", "'x' is not a whole number"),
        ("--prefer nearest", "'nearest' is not one of"),
        ("--cpu 0", "'0' is not a number of cores"),
        ("--cpu nan", "'nan' is not a number of cores"),
        ("--cpu -1", "'-1' is not a number of cores"),
        ("--cpu many", "'many' is not a number of cores"),
        ("--helper sleep", "'sleep' is not one of"),
        ("--yield-grace 5", "--yield-grace and --yield-signal need --helper"),
        ("--yield-signal USR1", "--yield-grace and --yield-signal need --helper"),
        ("--helper stop --yield-signal NOPE", "'NOPE' is not a signal"),
        ("--helper stop --yield-signal 0", "'0' is not a signal"),
        ("--helper stop --yield-signal KILL", "SIGKILL can't be handled by a program"),
        ("--helper stop --yield-grace -1", "-1 is not in the range"),
    ],
)
def test_what_breaks_a_rule_is_bad_usage(options: str, match: str) -> None:
    assert match in refused(*options.split()).output
