"""Time limits of checkpointable applications."""

from dataclasses import dataclass
from typing import Final

START_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class ApplicationTimeouts:
    """Time limits of an application.

    Attributes:
        answer_s: To answer a question.
        quiescence_s: To quiesce.
        checkpoint_s: To save itself, until all of it is written. The command's own timeout is shorter.
        restore_s: To be restored; likewise.
        cancel_s: To continue after a failure.
        start_s: To register after the start of its program.
    """

    answer_s: float = 10.0
    quiescence_s: float = 60.0
    checkpoint_s: float = 3600.0
    restore_s: float = 3600.0
    cancel_s: float = 10.0
    start_s: float = START_TIMEOUT_S


DEFAULT_TIMEOUTS: Final = ApplicationTimeouts()
