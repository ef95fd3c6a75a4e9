"""``penstock report``: an HTML page from a saved trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import UsageError, option, usage_errors

_EXAMPLES = """\
Examples, after trace.save("run.json") of `with pipe.trace() as trace:`:
  penstock report run.json                write run.html, to open in a browser
  penstock report run.json -o page.html
"""


app = typer.Typer(add_completion=False)


@app.command(epilog=_EXAMPLES)
def report(
    trace_file: Annotated[str, typer.Argument(metavar="TRACE", help="A saved trace.")],
    output: Annotated[
        str | None, option("The page to write (default: TRACE with .html).", "-o", "--output", metavar="FILE")
    ] = None,
) -> None:
    """Write an HTML report of a saved trace: timeline, idle time by cause, memory, advice."""
    from penstock.profile import Trace

    source = Path(trace_file)
    target = Path(output) if output else source.with_suffix(".html")
    if target.resolve() == source.resolve():
        raise UsageError(f"the page would overwrite the trace {trace_file!r}: give another file with -o")
    with usage_errors(f"cannot read {trace_file!r}", OSError):
        trace = Trace.load(source)
    with usage_errors(f"cannot write {str(target)!r}", OSError):
        findings = trace.report(target)
    print(findings.head)
    if trace.comparison is not None:
        print(trace.comparison)
    print(findings.best)
    print(f"{target}: open it in a browser")
