"""The words of eviction policies: WEIGHTS+PROCESS, such as ``offload+cuda_suspend``.

They are the names of the API in lower case; :mod:`leasehold_client.arguments.policies` has their values.
"""

from typing import Final

WEIGHTS: Final = ("retain", "offload", "discard")
"""Weight strategies: weights stay, move to host memory, or are dropped."""

PROCESSES: Final = ("keep_running", "cuda_suspend", "checkpoint", "stop")
"""Process strategies, from the weakest to the strongest."""

DEFAULT_WEIGHTS: Final = "retain"
DEFAULT_PROCESS: Final = "cuda_suspend"
