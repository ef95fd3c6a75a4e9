"""Control messages between the ranks of a pipeline: small objects and rows of numbers, apart from a step's tensors.

Each message begins with a row of numbers of fixed length, which says in which call of the pipeline its sender is. A
rank in another call raises an error instead of taking one message for another.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.engine.channel.base import ChannelError, Group, WaitTimer
from penstock.engine.failure.status import RankStatus
from penstock.errors import PlanError

_CALLS = (
    "a step or a call of the pipeline",
    "clip_grad_norm_() or grad_norm()",
    "state_dict(full=True)",
    "max_over_ranks() or a GradScaler",
    "trace()",
)
STEP, NORM, STATE, NUMBER, TRACE = range(len(_CALLS))

_OBJECT = -1  # in place of the length of a row
_MAX_ROW = 6


@dataclass
class ControlChannel:
    """Sends to one rank of the pipeline, or gathers from all."""

    group: Group
    ranks: Sequence[int]  # ranks[r] is the world rank of the pipeline's rank r
    status: RankStatus
    wait_timer: WaitTimer
    call: int = STEP  # the call that this rank is in
    _sending: list[Any] = field(default_factory=list)

    @contextmanager
    def in_call(self, call: int) -> Iterator[None]:
        """While this rank is in another call than a step."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def send_row(self, rank: int, row: Sequence[float], kind: int | None = None) -> None:
        """Start sending numbers; ``wait_sends`` waits for completion. ``kind`` is the length of the row by default."""
        numbers = [self.call, len(row) if kind is None else kind, *row, *[0.0] * (_MAX_ROW - len(row))]
        self._send_tensor(rank, torch.tensor(numbers, dtype=torch.float64, device="cpu"))

    def recv_row(self, rank: int, kind: int) -> list[float]:
        numbers = torch.empty(2 + _MAX_ROW, dtype=torch.float64, device="cpu")
        self._recv_tensor(rank, numbers)
        call, sent_kind, *row = numbers.tolist()
        if (call, sent_kind) != (self.call, kind):
            own, peer = self.ranks[self.group.rank()], self.ranks[rank]
            peer_call = "another one" if call == self.call else _CALLS[int(call)]
            raise PlanError(
                f"rank {own} is in {_CALLS[self.call]}, and rank {peer} in {peer_call}: all ranks must make the same "
                "calls of a pipeline, in the same order"
            )
        return row if kind == _OBJECT else row[:kind]

    def send(self, rank: int, value: Any) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.send_row(rank, [data.numel()], _OBJECT)
        self._send_tensor(rank, data)

    def recv(self, rank: int) -> Any:
        data = bytearray(int(self.recv_row(rank, _OBJECT)[0]))
        self._recv_tensor(rank, torch.frombuffer(data, dtype=torch.uint8))
        return pickle.loads(data)

    def wait_sends(self) -> None:
        """Wait until all messages that were sent have been received."""
        sending, self._sending = self._sending, []
        for rank, work, _ in sending:
            try:
                with self.status.waiting([self.ranks[rank]], "until its messages are taken by"):
                    self.wait_timer.wait(work)
            except RuntimeError as error:
                sending.clear()
                work = None
                raise ChannelError(self.ranks[rank], str(error)) from None

    def close(self) -> None:
        self._sending.clear()
        self.group = None

    def gather(self, value: Any) -> list[Any]:
        own_rank = self.group.rank()
        others = [rank for rank in range(len(self.ranks)) if rank != own_rank]
        for rank in others:
            self.send(rank, value)
        values = {rank: self.recv(rank) for rank in others}
        self.wait_sends()
        return [values.get(rank, value) for rank in range(len(self.ranks))]

    def _send_tensor(self, rank: int, tensor: torch.Tensor) -> None:
        try:
            self._sending.append((rank, self.group.send([tensor], rank, 1), tensor))
        except RuntimeError as error:
            raise ChannelError(self.ranks[rank], str(error)) from None

    def _recv_tensor(self, rank: int, tensor: torch.Tensor) -> None:
        try:
            with self.status.waiting([self.ranks[rank]]):
                self.wait_timer.wait(self.group.recv([tensor], rank, 1))
        except RuntimeError as error:
            raise ChannelError(self.ranks[rank], str(error)) from None
