"""The meaning of the driver's errors. docs/driver.md has the evidence for each."""

from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.errors_pb2 import ErrorReason

from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.errors import OperationError

SUCCESS: Final = 0
INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
OPERATING_SYSTEM: Final = 304
ILLEGAL_STATE: Final = 401
NOT_FOUND: Final = 500
NOT_READY: Final = 600
NOT_PERMITTED: Final = 800
NOT_SUPPORTED: Final = 801

NOT_CUDA: Final = frozenset({INVALID_VALUE, NOT_INITIALIZED})
"""Errors of the query for the restore thread of a process without CUDA, or of a zombie.

Driver 580.159.04 answers NOT_INITIALIZED for both. INVALID_VALUE may be the answer of other drivers: CRIU's
CUDA plugin treats both alike. A missing process answers OPERATING_SYSTEM, like a missing permission.
"""

_REASONS: Final[dict[tuple[DriverCall | None, int], tuple[ErrorReason.ValueType, str]]] = {
    (DriverCall.LOCK, NOT_READY): (
        errors_pb2.ERROR_REASON_LOCK_TIMEOUT,
        ("its submitted work did not finish in time, and it keeps running; try again when it is less busy"),
    ),
    (DriverCall.CHECKPOINT, OUT_OF_MEMORY): (
        errors_pb2.ERROR_REASON_INSUFFICIENT_HOST_MEMORY,
        (
            "the driver could not allocate host memory for the copy; free host memory, or raise "
            "the cgroup's limit"
        ),
    ),
    (DriverCall.RESTORE, OUT_OF_MEMORY): (
        errors_pb2.ERROR_REASON_MEMBER_WEDGED,
        (
            "the destination had too little memory, and the driver can't restore the process any more: "
            "stop the workload"
        ),
    ),
    (DriverCall.RESTORE, INVALID_VALUE): (
        errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU,
        "the driver refused the GPU pairs, and the process stays checkpointed: restore it on its former GPUs",
    ),
    (None, NOT_INITIALIZED): (
        errors_pb2.ERROR_REASON_NOT_A_CUDA_PROCESS,
        "it has not initialised CUDA: try again after it has",
    ),
    (None, ILLEGAL_STATE): (
        errors_pb2.ERROR_REASON_WRONG_STATE,
        "it is not in the state that this call needs: check its state, then try again",
    ),
    (DriverCall.RESTORE, OPERATING_SYSTEM): (
        errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
        "probably because an earlier restore failed: restore it on its former GPUs, or stop the workload",
    ),
    (None, OPERATING_SYSTEM): (
        errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
        (
            "the reason is unknown, as it lives, and the worker may control it: see `leasehold doctor`, then "
            "try again"
        ),
    ),
    (None, NOT_PERMITTED): (
        errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
        "its container lacks GPUs of the host, or persistence mode is off: see `leasehold doctor`",
    ),
    (DriverCall.LOCK, NOT_SUPPORTED): (
        errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
        (
            "a profiler or debugger (CUPTI, such as torch.profiler) is attached, and the process keeps "
            "running: end the profiling or debugging, then try again"
        ),
    ),
    (DriverCall.RESTORE, NOT_SUPPORTED): (
        errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
        (
            "the process lacks the device node of a GPU, or the driver is older than 580 and takes no GPU "
            "pairs: give its container all GPUs of the host, or restore it on its former GPUs"
        ),
    ),
    (None, NOT_SUPPORTED): (
        errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
        (
            "the process uses managed memory, or something else that this driver can't checkpoint: change "
            "the program"
        ),
    ),
    (None, NOT_FOUND): (
        errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER,
        "this driver has no checkpoint API: it needs CUDA 12.8 (driver 570) or newer",
    ),
}

_WEDGED: Final = {
    INVALID_VALUE: (
        "the process probably has imported CUDA IPC memory (cuIpcOpenMemHandle), and the driver can't "
        "restore such a process: stop the workload"
    ),
    OPERATING_SYSTEM: (
        "an earlier restore failed, as for a process that has imported CUDA IPC memory, and the driver can't "
        "restore the process any more: stop the workload"
    ),
}
"""Errors of a restore without GPU pairs that wedges a process, or has found it wedged."""


class DriverError(Exception):
    """The driver returned an error.

    Attributes:
        call: The driver call.
        pid: The target.
        result: The CUresult; None if the bindings couldn't decode it.
        result_name: Its name.
        ended: The driver helper saw that the process had ended.
        obstacle: Why the worker may not control the process, with the remedy. Empty: it may, or the error has
            another reason.
    """

    def __init__(
        self,
        call: DriverCall,
        pid: int,
        result: int | None,
        result_name: str,
        *,
        ended: bool = False,
        obstacle: str = "",
    ) -> None:
        super().__init__(f"{call} of process {pid}: {result_name}")
        self.call = call
        self.pid = pid
        self.result = result
        self.result_name = result_name
        self.ended = ended
        self.obstacle = obstacle

    def wedges(self, *, with_pairs: bool) -> bool:
        """Whether a process that is CHECKPOINTED after this error can't be restored any more.

        A restore that runs out of memory wedges the process (NVIDIA/cuda-checkpoint issue 44). So does the
        first restore of a process that has imported memory by CUDA IPC, with INVALID_VALUE. Each further
        restore answers OPERATING_SYSTEM (all seen on 580.159.04). With GPU pairs, INVALID_VALUE can mean
        wrong pairs, which do no harm. A restore without pairs then tells the difference.

        Args:
            with_pairs: Whether GPU pairs were given to the driver.
        """
        if self.call is not DriverCall.RESTORE or self.ended or self.obstacle:
            return False
        return self.result == OUT_OF_MEMORY or (self.result in _WEDGED and not with_pairs)

    def to_operation_error(self, *, observed_state: str, alive: bool, wedged: bool = False) -> OperationError:
        """The error in its form on the wire.

        Args:
            observed_state: The state of the process after the error.
            alive: Whether the process lives.
            wedged: Whether the process can't be restored any more.
        """
        metadata = {
            "phase": str(self.call),
            "pid": str(self.pid),
            "cuda_result": self.result_name,
            "observed_state": observed_state,
        }
        if self.result is not None:
            metadata["cuda_result_number"] = str(self.result)
        reason, meaning = self._meaning(alive=alive)
        if wedged and self.result in _WEDGED:
            reason, meaning = errors_pb2.ERROR_REASON_MEMBER_WEDGED, _WEDGED[self.result]
        return OperationError(
            reason, f"{self.call} of process {self.pid} failed ({self.result_name}): {meaning}", metadata
        )

    def _meaning(self, *, alive: bool) -> tuple[ErrorReason.ValueType, str]:
        if self.ended or not alive:
            return errors_pb2.ERROR_REASON_TARGET_CRASHED, "the process has ended: look at its output"
        if self.obstacle:
            return (
                errors_pb2.ERROR_REASON_PERMISSION_OR_OS,
                f"the worker may not control the process, as {self.obstacle}",
            )
        if self.result is None:
            return (
                errors_pb2.ERROR_REASON_DRIVER_ERROR,
                "the driver is newer than the worker's cuda-bindings; update them",
            )
        known = _REASONS.get((self.call, self.result)) or _REASONS.get((None, self.result))
        return known or (
            errors_pb2.ERROR_REASON_DRIVER_ERROR,
            "the driver's reference explains the result; if the workload is UNKNOWN, restore it",
        )
