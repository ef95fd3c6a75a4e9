"""Small messages between the ranks of a pipeline, apart from the tensors of a step.

Each begins with a row of numbers of one length, which says in which call of the pipeline its sender is. A rank in
another one learns of it, and does not take the one message for the other.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from penstock.engine.channel.base import ChannelError, WaitTimer
from penstock.engine.channel.groups import Group
from penstock.engine.failure.status import RankStatus
from penstock.errors import PlanError

__all__ = ["NORM", "NUMBER", "STATE", "STEP", "TRACE", "ControlChannel"]

_CALLS = (
    "a step or a call of the pipeline",
    "clip_grad_norm_() or grad_norm()",
    "state_dict(full=True)",
    "agree() or a GradScaler",
    "trace()",
)
STEP, NORM, STATE, NUMBER, TRACE = range(len(_CALLS))

_OBJECT = -1  # in the place of a row's length
_LONGEST = 6


class ControlChannel:
    """Objects and short rows of numbers, to one rank of the pipeline or gathered from all."""

    def __init__(self, group: Group, ranks: Sequence[int], doing: RankStatus) -> None:
        self.group = group
        self.waited = WaitTimer()  # told how long this rank has to wait
        self.ranks = ranks  # ranks[r] is the world rank of the pipeline's rank r
        self.doing = doing
        self.call = STEP  # what this rank is in
        self._sending: list[Any] = []

    @contextmanager
    def within(self, call: int) -> Iterator[None]:
        """While this rank is in another call than a step."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def send_row(self, rank: int, row: Sequence[float]) -> None:
        """Start sending numbers; the sends are waited for in ``settle``."""
        self._begin(rank, len(row), row)

    def take_row(self, rank: int, length: int) -> list[float]:
        return self._beginning(rank, length)[:length]

    def send(self, rank: int, value: Any) -> None:
        """Start sending an object."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self._begin(rank, _OBJECT, [data.numel()])
        self._start(rank, data)

    def take(self, rank: int) -> Any:
        data = bytearray(int(self._beginning(rank, _OBJECT)[0]))
        self._wait(rank, torch.frombuffer(data, dtype=torch.uint8))
        return pickle.loads(data)

    def settle(self) -> None:
        """Wait until everything sent has been taken."""
        sending, self._sending = self._sending, []
        start = perf_counter()
        for rank, work, _ in sending:
            try:
                with self.doing.waiting([self.ranks[rank]], "until its messages are taken by"):
                    work.wait()
            except RuntimeError as error:
                sending.clear()
                work = None
                raise ChannelError(self.ranks[rank], str(error)) from None
        self.waited.seconds += perf_counter() - start

    def close(self) -> None:
        self._sending.clear()
        self.group = None

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        here = self.group.rank()
        others = [rank for rank in range(len(self.ranks)) if rank != here]
        for rank in others:
            self.send(rank, value)
        values = {rank: self.take(rank) for rank in others}
        self.settle()
        return [values.get(rank, value) for rank in range(len(self.ranks))]

    def _begin(self, rank: int, kind: int, row: Sequence[float]) -> None:
        numbers = [self.call, kind, *row, *[0.0] * (_LONGEST - len(row))]
        self._start(rank, torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    def _beginning(self, rank: int, kind: int) -> list[float]:
        numbers = torch.empty(2 + _LONGEST, dtype=torch.float64, device="cpu")
        self._wait(rank, numbers)
        call, sent, *row = numbers.tolist()
        if (call, sent) != (self.call, kind):
            here, there = self.ranks[self.group.rank()], self.ranks[rank]
            found = "another one" if call == self.call else _CALLS[int(call)]
            raise PlanError(
                f"rank {here} is in {_CALLS[self.call]}, and rank {there} in {found}: all ranks must make the same "
                "calls of a pipeline, in the same order"
            )
        return row

    def _start(self, rank: int, tensor: torch.Tensor) -> None:
        try:
            self._sending.append((rank, self.group.send([tensor], rank, 1), tensor))
        except RuntimeError as error:
            raise ChannelError(self.ranks[rank], str(error)) from None

    def _wait(self, rank: int, tensor: torch.Tensor) -> None:
        start = perf_counter()
        try:
            with self.doing.waiting([self.ranks[rank]]):
                self.group.recv([tensor], rank, 1).wait()
            self.waited.seconds += perf_counter() - start
        except RuntimeError as error:
            raise ChannelError(self.ranks[rank], str(error)) from None
