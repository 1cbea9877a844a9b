"""SIGINT raises KeyboardInterrupt while a verb runs, and ends the process at any other time."""

import signal
import sys


def end_at_once() -> None:
    """Restores the default action of SIGINT, unless SIGINT is ignored.

    Python's own handler raises KeyboardInterrupt. Imports, destructors and the interpreter's shutdown would
    print it as a traceback.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_in_verb() -> None:
    """Makes SIGINT raise KeyboardInterrupt again, after :func:`end_at_once`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_in_call() -> None:
    """As :func:`raise_in_verb`, for a verb that makes calls.

    An exception of a signal handler may leave a call half made, and a thread or a destructor of gRPC may fail
    because of it. Python would print its traceback. Each call has a deadline, so nothing waits for that
    thread.
    """
    import threading  # late: most of the command's life needs no threads

    raise_in_verb()
    threading.excepthook = lambda failure: None
    previous = sys.unraisablehook
    sys.unraisablehook = lambda failure: None if _is_of_grpc(failure) else previous(failure)


def _is_of_grpc(failure: "sys.UnraisableHookArgs") -> bool:
    """Whether a destructor of gRPC has failed."""
    return str(getattr(failure.object, "__module__", "")).startswith("grpc.")
