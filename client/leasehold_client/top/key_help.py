"""The keys of ``leasehold top``, as text."""

from typing import Final

from rich.text import Text

from leasehold_client.top.row_text import LEGEND

_KEYS: Final = (
    *("s suspend", "r restore", "m move", "x stop", "c cordon", "k cancel"),
    *("/ filter", "? help", "q quit", "o sort", "p pause", "Tab commands", "Enter details"),
)

_WAYS_OUT: Final = ("? help", "q quit")


def keys_line(width: int) -> Text:
    """The line of keys, the most needed first. A narrow line begins with the keys of help and quit."""
    needed = _KEYS[: _KEYS.index("q quit") + 1]
    fits = len(" ".join(needed)) + 2 <= width  # with the padding of top.tcss
    keys = _KEYS if fits else (*_WAYS_OUT, *(key for key in _KEYS if key not in _WAYS_OUT))
    return Text(" ").join(
        Text.assemble((key, "bold reverse"), " ", word)
        for key, _, word in (one.partition(" ") for one in keys)
    )


HELP: Final = (
    "A host has a slot for each GPU. Below the slots are",
    "parked workloads and waiting claims. The lower list",
    "has commands, with their phases.",
    "",
    *LEGEND,
    "",
    "up, down       move the cursor; so do PageUp, PageDown,",
    "               Home and End",
    "left, right    close or open a host",
    "Tab            go to the commands, or back",
    "Enter          details",
    "s  suspend     park the workload of this GPU, and free it",
    "r  restore     restore a parked workload on its former",
    "               or other free GPUs",
    "m  move        move a workload to a slot of its host;",
    "               Enter chooses the slot. Two workloads",
    "               exchange their slots. A parked one is",
    "               restored there.",
    "x  stop        stop the workload",
    "c  cordon      cordon or uncordon this host or GPU",
    "k  cancel      cancel this command, or the command",
    "               about this workload",
    "/  filter      words that a host, GPU or workload",
    "               contains, or an expression of docs/api.md,",
    "               such as: gpu_name:H100 AND state = FREE",
    "               Esc ends a filter that was refused.",
    "o  sort        next order of hosts",
    "p  pause       stop the list, until p, a filter, or",
    "               another order",
    "q, Ctrl-C      quit; commands continue",
    "",
    "Nothing changes before its plan is shown and y is pressed.",
)
"""The text of the help. No line is wider than the dialog on a terminal of 80 columns."""
