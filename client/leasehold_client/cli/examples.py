"""Examples in the help of verbs."""


def examples(*lines: str) -> str:
    """The end of a verb's help: command lines to copy. Tests parse each of them.

    Args:
        lines: Command lines that begin with ``leasehold``.
    """
    heading = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", heading, *(f"  {line}" for line in lines)])
