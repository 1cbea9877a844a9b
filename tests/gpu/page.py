"""The report as one page of Markdown, part of which goes into docs/driver.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any


def page(report: Mapping[str, Any]) -> str:
    """The page of a report, finished or not."""
    machine, steps, assumptions = report["machine"], report["steps"], report["assumptions"]
    simulated = bool(machine.get("simulated"))
    lines = [
        "# Leasehold on real GPUs" if not simulated else "# Leasehold on simulated GPUs: a trial of the kit",
        "",
    ]
    if not report["finished"]:
        lines += ["**The report is not finished.** What follows is all that was done.", ""]
    lines += [
        f"{report['date']}, {report['seconds']:.0f} s.",
        "",
        '## For docs/driver.md, "Confirmed on real GPUs"',
        "",
    ]
    lines += ["| Driver | GPU | Date | What was seen |", "|---|---|---|---|", confirmed(report), ""]
    lines += ["## What it assumes", "", "| Number | Holds | What was seen |", "|---|---|---|"]
    lines += [
        f"| {number} | {found['answer']} | {cell(found['seen'])} |" for number, found in assumptions.items()
    ]
    lines += ["", "## Steps", "", "| Step | Result | Seconds | Left processes |", "|---|---|---|---|"]
    for step in steps:
        left = cell("; ".join(step["leftovers"]))
        lines.append(f"| {step['name']} | {step['result']} | {step['seconds']:.1f} | {left} |")
    lines += ["", "## Machine", "", "```json", json.dumps(machine, indent=1), "```", ""]
    for step in steps:
        if step["output"]:
            lines += [
                f"## Output: {step['name']}",
                "",
                "```",
                step["output"].replace("```", "'''"),
                "```",
                "",
            ]
    return "\n".join(lines)


def confirmed(report: Mapping[str, Any]) -> str:
    """The row of the table of docs/driver.md."""
    machine = report["machine"]
    names = Counter(gpu["name"] for gpu in machine.get("gpus", ()))
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items())
    if machine.get("simulated"):
        gpus = f"SIMULATED {gpus}: not for this table"
    steps = Counter(step["result"] for step in report["steps"])
    by_answer: dict[str, list[str]] = {}
    for number, found in report["assumptions"].items():
        by_answer.setdefault(found["answer"], []).append(number)
    seen = [f"steps: {', '.join(f'{count} {result}' for result, count in steps.items())}"]
    seen += [f"assumptions {answer}: {', '.join(numbers)}" for answer, numbers in by_answer.items()]
    failed = [step["name"] for step in report["steps"] if step["result"] in ("failed", "timed out")]
    if failed:
        seen.append(f"not well: {', '.join(failed)}")
    return (
        f"| {machine.get('driver', '-')} | {gpus or '-'} | {report['date'][:10]} | {cell('; '.join(seen))} |"
    )


def cell(text: str) -> str:
    """A text that stays within a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
