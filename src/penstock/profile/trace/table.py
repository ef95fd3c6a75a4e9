"""A trace as a table: a row for each action."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import PlanError
from penstock.profile.trace.measure import crossings

if TYPE_CHECKING:
    from penstock.profile.trace.trace import Trace

__all__ = ["rows", "write_rows"]

_TYPES = {
    "step": "int64", "run": "string", "failed": "bool", "replica": "int64", "rank": "int64", "action": "string",
    "stage": "int64", "kind": "string", "microbatch": "int64", "start": "float64", "end": "float64",
    "seconds": "float64", "launched": "float64", "waited": "float64", "waited_for": "int64", "sent": "int64",
    "received": "int64", "memory": "int64",
}  # fmt: skip
"""Of the columns in Parquet: they do not depend on what a trace has, so that the files of several are one table."""


def rows(trace: Trace) -> list[dict[str, Any]]:
    """The actions of all ranks and steps. ``received`` counts bytes from other stages, of this rank or of others."""
    found = []
    for step in trace.steps:
        received: dict[int, int] = {}
        for crossing in crossings(trace, step):
            received[id(crossing.taker)] = received.get(id(crossing.taker), 0) + crossing.sent.bytes
        for part in step.parts:
            track = trace.tracks[part.track]
            for done in part.actions:
                waits = sorted(done.waits, key=lambda wait: wait.start - wait.end)
                found.append(
                    {
                        "step": step.number,
                        "run": step.kind,
                        "failed": step.failed,
                        "replica": track.replica,
                        "rank": track.rank,
                        "action": str(done.action),
                        "stage": done.action.stage,
                        "kind": done.action.kind,
                        "microbatch": done.action.microbatch,
                        "start": done.start,
                        "end": done.end,
                        "seconds": done.seconds,
                        "launched": done.launched,
                        "waited": done.waited,
                        "waited_for": waits[0].peer if waits else None,  # the stage that it waited for longest
                        "sent": sum(sent.bytes for sent in done.sends),
                        "received": received.get(id(done), 0),
                        "memory": done.memory,
                    }
                )
    return found


def write_rows(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    if path.suffix == ".json":
        path.write_text(json.dumps(found))
        return
    if path.suffix != ".parquet":
        raise PlanError(f"a table is written as .json or .parquet, not as {path.name!r}")
    try:
        import pyarrow  # type: ignore[import-not-found,import-untyped,unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        raise PlanError("to write .parquet, pyarrow is needed: pip install pyarrow, or write .json") from error
    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in _TYPES.items()])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(found), schema), path)
