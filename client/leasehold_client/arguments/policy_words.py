"""The words of eviction policies: WEIGHTS+PROCESS, such as ``offload+cuda_suspend``.

They are the names of the API in lower case; :mod:`leasehold_client.arguments.policies` has their values.
"""

from typing import Final

WEIGHTS: Final = ("retain", "offload", "discard")
"""What a framework does with its weights first: they stay, go to host memory, or are dropped."""

PROCESSES: Final = ("keep_running", "cuda_suspend", "checkpoint", "stop")
"""What happens to the processes, each stronger than the one before."""

DEFAULT_WEIGHTS: Final = "retain"
DEFAULT_PROCESS: Final = "cuda_suspend"
