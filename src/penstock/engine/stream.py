"""Evaluation of many mini-batches in a row, without draining the pipeline between them.

rank 0   a0 a1 a2 b0 b1 b2 c0 c1 …        a worker goes on with the next mini-batch as soon as it has done its part
rank 1      a0 a1 a2 b0 b1 b2 c0 …        of the one before; the caller takes the outputs in order
rank 2         a0 a1 a2 b0 b1 b2 …
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from penstock.engine.context import begin_run, caller_context
from penstock.engine.loss import ModelLoss
from penstock.engine.message import unflatten
from penstock.engine.microbatch import join, split_inputs
from penstock.engine.recompute.batchnorm import commit_statistics, deferred_statistics_of
from penstock.engine.runner import PipelineIO
from penstock.engine.stage import Slot
from penstock.engine.threads import ThreadExecutor, ThreadProgram
from penstock.engine.workers import RunReport
from penstock.schedule.lower import lower

__all__ = ["stream"]

AHEAD = 2
"""How many mini-batches may be under way beside the one whose outputs are taken."""


@dataclass
class _InFlightBatch:
    job: ThreadProgram
    report: RunReport
    model_loss: ModelLoss


def stream(crew: ThreadExecutor, values: Iterable[Any]) -> Iterator[Any]:
    """The outputs of each value, in order. The pipeline is taken up by it until it ends or is closed."""
    waiting: deque[_InFlightBatch] = deque()
    crew.streaming = True
    try:
        for value in values:
            waiting.append(_start(crew, value))
            if len(waiting) > AHEAD:
                yield _take(crew, waiting.popleft())
        while waiting:
            yield _take(crew, waiting.popleft())
    finally:
        for left in waiting:
            left.job.cancel()
        for left in waiting:
            while not crew.closed and len(left.report.outcomes) < len(left.job.runners):
                left.report.news.get()
        for stage in crew.stages.values():
            stage.moments = ()
        crew.streaming = False


def _start(crew: ThreadExecutor, value: Any) -> _InFlightBatch:
    sizes, messages = split_inputs(value, crew.source.count, crew.stages[0].device)
    programs = lower(crew.source.forward_only(len(sizes)), crew.edges)
    slots = {(s, k): Slot() for program in programs for s, k in program.slots}
    inputs = [message.detached()._replace(wants=()) for message in messages]
    job = crew.compile(
        [program.instructions for program in programs],
        len(sizes),
        slots,
        PipelineIO(inputs, outputs=[None] * len(sizes)),
    )
    state, run_name = caller_context(), crew.run_names.next(training=False)
    batch = _InFlightBatch(job, RunReport(SimpleQueue()), ModelLoss(()))

    def part(rank: int, task: Callable[[], None]) -> None:
        """A worker prepares its own stages: others may still be busy with the mini-batch before."""
        own = [stage for s, stage in crew.stages.items() if crew.placement[s] == rank]
        begin_run(own, state, len(sizes), run_name)
        if crew.placement[-1] == rank:
            crew.head.begin(sizes, None, None)
            batch.model_loss = crew.head.model_loss
        with commit_statistics(deferred_statistics_of({stage.index: stage for stage in own})):
            task()

    tasks = [partial(part, rank, task) for rank, task in enumerate(crew.tasks(job, grad=False))]
    batch.report = crew.workers.start(tasks)
    return batch


def _take(crew: ThreadExecutor, batch: _InFlightBatch) -> Any:
    try:
        crew.workers.wait(batch.report, batch.job.cancel, crew.hang_detector(batch.job).check)
    except BaseException:
        crew.forget()
        raise
    assert batch.job.ends.outputs is not None
    messages = [message for message in batch.job.ends.outputs if message is not None]
    return batch.model_loss.settle(join([unflatten(message.leaves, message.spec) for message in messages]))
