"""Options of a workload's resources and of preemptible workloads, for ``run`` and ``exec``."""

import math
import signal
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import click

from leasehold_client.byte_sizes import IntegerType, Size
from leasehold_client.cli.exit_codes import not_utf8
from leasehold_client.cli.parameter_types import Number, Seconds
from leasehold_client.cli.verb import YEAR_S

UNITS_LIMIT: Final = 2**31 - 1
CORES_LIMIT: Final = 1e6

PREFERENCES: Final = {
    "lowest-slot": "GPU_PREFERENCE_LOWEST_SLOT",
    "same-as-before": "GPU_PREFERENCE_SAME_AS_BEFORE",
    "same-numa-node": "GPU_PREFERENCE_SAME_NUMA_NODE",
    "most-free-memory": "GPU_PREFERENCE_MOST_FREE_MEMORY",
}
"""Names of the proto's enum GpuPreference."""

YIELDS: Final = {"suspend": "PROCESS_STRATEGY_CUDA_SUSPEND", "stop": "PROCESS_STRATEGY_STOP"}
"""Names of the proto's enum ProcessStrategy."""

UNCATCHABLE: Final = (signal.SIGKILL, signal.SIGSTOP)


class Cores(IntegerType):
    """A click parameter type: a number of processor cores, as millicores."""

    name = "number of cores"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses the number."""
        text = str(value)
        try:
            cores = float(text[:-1]) / 1000 if text.endswith("m") else float(text)
        except ValueError:
            cores = math.nan
        if not 0.001 <= cores <= CORES_LIMIT:  # false for NaN too
            self.fail(
                f"{value!r} is not a number of cores: write a number from 0.001 to 1000000, such as 2.5 or "
                "500m",
                param,
                ctx,
            )
        return round(cores * 1000)


class Signal(IntegerType):
    """A click parameter type: a signal by name or number, as a number."""

    name = "signal"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses the name."""
        text = str(value).upper()
        found = text if text.isdecimal() else f"SIG{text.removeprefix('SIG')}"
        try:
            number = signal.Signals(int(found)) if found.isdecimal() else signal.Signals[found]
        except (ValueError, KeyError):
            self.fail(f"{value!r} is not a signal: write a name, such as USR1", param, ctx)
        if number in UNCATCHABLE:
            self.fail(f"{number.name} can't be handled by a program: choose another signal", param, ctx)
        return int(number)


def resource_options(function: Callable[..., None], *, gpus: int = 0) -> Callable[..., None]:
    """Adds the options of a workload's resources, as the argument ``resources``.

    The name of each option's value is the name of a field of ``Resources``.

    Args:
        function: The verb.
        gpus: Default number of GPUs.
    """

    @click.option(
        "--gpus",
        "gpu_count",
        type=Number(0, UNITS_LIMIT),
        default=gpus,
        show_default=True,
        help="Number of whole GPUs.",
    )
    @click.option(
        "--gpu-memory",
        "gpu_memory_bytes",
        type=Size(),
        metavar="SIZE",
        help="Minimum memory of each GPU, such as 40GiB.",
    )
    @click.option("--gpu-name", metavar="NAME", help="Product name of each GPU.")
    @click.option(
        "--gpu-units",
        type=Number(1, UNITS_LIMIT),
        metavar="N",
        help="Minimum throughput units of all GPUs together; the smallest sufficient sum is used.",
    )
    @click.option(
        "--acceptable-units",
        "acceptable_gpu_units",
        type=Number(1, UNITS_LIMIT),
        multiple=True,
        metavar="N",
        help="Allowed units of each GPU; may be repeated.",
    )
    @click.option(
        "--prefer",
        type=click.Choice(PREFERENCES),
        help="Preference among matching GPUs.  [default: lowest-slot]",
    )
    @click.option(
        "--allow-foreign",
        is_flag=True,
        help="Allow GPUs with memory of processes that Leasehold did not start.",
    )
    @click.option(
        "--cpu", "cpu_millicores", type=Cores(), metavar="CORES", help="Processor cores, such as 2.5 or 500m."
    )
    @click.option("--memory", "memory_bytes", type=Size(), metavar="SIZE", help="Host memory.")
    @click.option("--disk", "disk_bytes", type=Size(), metavar="SIZE", help="Disk.")
    @wraps(function)
    def call(*positional: Any, prefer: str | None, **named: Any) -> None:
        from leasehold.v1.workload_pb2 import GpuPreference, Resources

        preference = PREFERENCES[prefer] if prefer else "GPU_PREFERENCE_UNSPECIFIED"
        fields = {name: named.pop(name) for name in Resources.DESCRIPTOR.fields_by_name if name in named}
        try:
            resources = Resources(gpu_preference=GpuPreference.Value(preference), **fields)
        except UnicodeEncodeError as error:
            raise click.UsageError(not_utf8(error).message) from error
        except ValueError as error:  # a number of a job file; those of options are in range
            raise click.UsageError(
                f"a number of the requested resources is too large ({error}): give at most {2**63 - 1}"
            ) from error
        function(*positional, resources=resources, **named)

    return call


def helper_options(function: Callable[..., None]) -> Callable[..., None]:
    """Adds the options of a preemptible workload, as the argument ``helper``. None: not preemptible."""

    @click.option(
        "--helper",
        "yields",
        type=click.Choice(YIELDS),
        help="Make the workload preemptible: it gets idle GPUs, and is suspended or stopped for others.",
    )
    @click.option(
        "--yield-grace",
        "yield_grace_s",
        type=Seconds(0, YEAR_S),
        metavar="SECONDS",
        help="Time between the yield request and the preemption.  [default: 10]",
    )
    @click.option(
        "--yield-signal",
        type=Signal(),
        metavar="NAME",
        help="Signal of the yield request, such as USR1.  [default: none]",
    )
    @wraps(function)
    def call(
        *positional: Any,
        yields: str | None,
        yield_grace_s: float | None,
        yield_signal: int | None,
        **named: Any,
    ) -> None:
        if yields is None and (yield_grace_s is not None or yield_signal is not None):
            raise click.UsageError(
                "--yield-grace and --yield-signal need --helper suspend or --helper stop",
                click.get_current_context(),
            )
        helper = None
        if yields is not None:
            from leasehold.v1.eviction_pb2 import ProcessStrategy
            from leasehold.v1.workload_pb2 import HelperTerms

            from leasehold_client.messages import duration

            helper = HelperTerms(
                grace=duration(yield_grace_s),
                process_strategy=ProcessStrategy.Value(YIELDS[yields]),
                signal_number=yield_signal,
            )
        function(*positional, helper=helper, **named)

    return call
