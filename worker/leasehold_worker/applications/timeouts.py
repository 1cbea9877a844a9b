"""How long applications that save themselves may take."""

from dataclasses import dataclass
from typing import Final

START_TIMEOUT_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class ApplicationTimeouts:
    """How long an application may take.

    Attributes:
        answer_s: To answer a question.
        quiescence_s: To come to rest.
        checkpoint_s: To save itself, until all of it is written. The command's own timeout is shorter.
        restore_s: To be restored; likewise.
        cancel_s: To go on after a failure.
        start_s: To serve its kernel once its program was started.
    """

    answer_s: float = 10.0
    quiescence_s: float = 60.0
    checkpoint_s: float = 3600.0
    restore_s: float = 3600.0
    cancel_s: float = 10.0
    start_s: float = START_TIMEOUT_S


DEFAULT_TIMEOUTS: Final = ApplicationTimeouts()
