"""``penstock report``: a page of what a run measured, from the trace that it saved."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["configure", "run"]

_EXAMPLES = """\
examples:
  penstock report run.json                  write run.html, to open in a browser
  penstock report run.json -o page.html

run.json is what trace.save("run.json") wrote, after `with pipe.trace() as trace:`.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = _EXAMPLES
    parser.add_argument("trace", metavar="TRACE", help="a saved trace")
    parser.add_argument("-o", "--output", metavar="FILE", help="the page to write (default: TRACE with .html)")
    parser.set_defaults(usage_error=parser.error)


def run(args: argparse.Namespace) -> int:
    """Do what ``args`` say."""
    from penstock.profile.trace import Trace

    source = Path(args.trace)
    target = Path(args.output) if args.output else source.with_suffix(".html")
    if target.resolve() == source.resolve():
        args.usage_error(f"the page would be written over the trace {args.trace!r}: give another file with -o")
    try:
        trace = Trace.load(source)
    except OSError as error:
        args.usage_error(f"cannot read {args.trace!r}: {error.strerror or error}")
    try:
        findings = trace.report(target)
    except OSError as error:
        args.usage_error(f"cannot write {str(target)!r}: {error.strerror or error}")
    print(findings.head)
    if trace.comparison is not None:
        print(trace.comparison)
    print(findings.best)
    print(f"{target}: open it in a browser")
    return 0
