"""``penstock doctor``: is this machine ready, and what would fail?"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated

import torch.distributed as dist
import typer

from penstock.doctor.judge import Line, judge
from penstock.doctor.look import look
from penstock.train.launch import is_rank0
from penstock.viz import print_text

__all__ = ["app"]

_DETAILS = """\
Looks at versions, cores, memory, devices, limits, names and launchers, starts two processes and lets them exchange
messages (over gloo, and over NCCL where there are two GPUs). Each line is ok, warn or fail, with what to do. The exit
code is 1 if something would fail, else 0.

examples:
  penstock doctor                                this machine
  penstock doctor --json                         the same for programs, with all that was found
  penstock run --stages 4 -m penstock doctor     between the processes of a launcher: torchrun and srun do as well
"""


app = typer.Typer(add_completion=False)


@app.command(epilog=_DETAILS)
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Write facts and lines as JSON.")] = False) -> int:
    """Check that this machine is ready."""
    facts = look()
    lines = _of_all_ranks(judge(facts))
    failed = any(line.status == "fail" for line in lines)
    if dist.is_initialized() and not is_rank0():
        return 0  # rank 0 tells for all: a launcher would end it if another one failed first
    if as_json:
        found = {"ok": not failed, "lines": [asdict(line) for line in lines], "facts": asdict(facts)}
        text = json.dumps(found, indent=2)
    else:
        text = "\n".join(_page(lines, shutil.get_terminal_size((80, 24)).columns))
    print_text(text, sys.stdout)
    return int(failed)


def _of_all_ranks(lines: list[Line]) -> list[Line]:
    """Under a launcher: this rank's lines, and what the others have found besides."""
    if not dist.is_initialized():
        return lines
    everyone: list[list[Line]] = [[] for _ in range(dist.get_world_size())]
    try:
        dist.all_gather_object(everyone, lines)
    except RuntimeError as error:
        return [*lines, Line("fail", "ranks", f"not all have come to the end: {error}", "look at each of them alone")]
    seen = {(line.what, line.text) for line in lines}
    for rank, its in enumerate(everyone):
        for line in its:
            if line.status != "ok" and (line.what, line.text) not in seen:
                seen.add((line.what, line.text))
                lines = [*lines, replace(line, text=f"rank {rank}: {line.text}")]
    return lines


def _page(lines: Sequence[Line], width: int) -> list[str]:
    """One line for each, more where it needs an explanation, and what would fail."""
    label = max(len(line.what) for line in lines)
    indent = " " * (label + 8)
    page = []
    for line in lines:
        page += _wrapped(f"{line.status:<4}  {line.what:<{label}}  {line.text}", indent, width)
        if line.do:
            page += _wrapped(f"{indent}-> {line.do}", f"{indent}   ", width)
    failed = [line.what for line in lines if line.status == "fail"]
    warned = sum(line.status == "warn" for line in lines)
    warnings = f"{warned} warning{'s' * (warned != 1)}" if warned else "no warnings"
    if failed:
        return [*page, "", f"What would fail: {', '.join(dict.fromkeys(failed))} ({warnings})."]
    return [*page, "", f"Nothing would fail ({warnings})."]


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, len(indent) + 20), subsequent_indent=indent, break_on_hyphens=False)
