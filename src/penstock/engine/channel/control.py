"""Small messages between the ranks of a pipeline, apart from the tensors of a step."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from penstock.engine.channel.group import Group
from penstock.engine.channel.process import ChannelError
from penstock.engine.doing import Doing
from penstock.engine.idle import Waited

__all__ = ["Control"]


class Control:
    """Objects and short rows of numbers, to one rank of the pipeline or gathered from all."""

    def __init__(self, group: Group, ranks: Sequence[int], doing: Doing) -> None:
        self.group = group
        self.waited = Waited()  # told how long this rank has to wait
        self.ranks = ranks  # ranks[r] is the world rank of the pipeline's rank r
        self.doing = doing
        self._sending: list[Any] = []

    def send_row(self, rank: int, row: Sequence[float]) -> None:
        """Start sending numbers; the sends are waited for in ``settle``."""
        self._start(rank, torch.tensor(row, dtype=torch.float64, device="cpu"))

    def take_row(self, rank: int, length: int) -> list[float]:
        row = torch.empty(length, dtype=torch.float64, device="cpu")
        self._wait(rank, row)
        return row.tolist()

    def send(self, rank: int, value: Any) -> None:
        """Start sending an object."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.send_row(rank, [data.numel()])
        self._start(rank, data)

    def take(self, rank: int) -> Any:
        data = bytearray(int(self.take_row(rank, 1)[0]))
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
