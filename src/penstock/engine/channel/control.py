"""Control messages between the ranks of a pipeline: small objects and rows of numbers, apart from a step's tensors.

Each message begins with a row of numbers of fixed length, which names the sender's call of the pipeline. A rank in
another call raises an error instead of misreading the message.

Objects are pickled. A message cannot run code when it is unpickled: only known types of imported modules are accepted.
Tensors and arrays are encoded by torch and NumPy, and loaded without pickles.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_safe_globals

from penstock._torch import pytree
from penstock.engine.channel.base import ChannelError, Group, WaitTimer
from penstock.engine.failure.status import RankStatus
from penstock.engine.message import unpickle_meta
from penstock.errors import PipelineError, PlanError

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


# ── objects as bytes ─────────────────────────────────────────────────────────────────────────────────────────────


def encode(value: Any) -> bytes:
    """Pickle a value for another rank. Raises ``PlanError`` for a type that ``decode`` would refuse."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()


def decode(data: bytes | bytearray) -> Any:
    """The value of a message. Raises ``PipelineError`` if it is damaged, or names anything but a known type."""
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise PipelineError(f"a message of another rank cannot be read: {error}") from error


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        buffer, numpy = io.BytesIO(), sys.modules.get("numpy")
        if isinstance(value, Tensor):
            torch.save(value, buffer)
            return _load_tensor, (buffer.getvalue(),)
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            numpy.save(buffer, value, allow_pickle=False)
            return _load_array, (buffer.getvalue(), isinstance(value, numpy.generic))
        if isinstance(value, _CONSTANTS):
            return _constant, (str(value).removeprefix("torch."),)
        if isinstance(value, Enum):
            return type(value), (value.value,)
        kind = value if isinstance(value, type) else type(value)
        if not (_is_known(value) or _is_known(kind)):
            raise PlanError(
                f"a {kind.__module__}.{kind.__qualname__} cannot be sent to another process: send tensors, plain "
                "values, and tuples, lists, dicts and dataclasses of them; or, for a class that you trust, call "
                f"torch.serialization.add_safe_globals([{kind.__name__}]) on every rank"
            )
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        value: Any = sys.modules.get(module)
        for part in name.split("."):
            value = getattr(value, part, None)
        if not _is_known(value):
            raise pickle.UnpicklingError(f"{module}.{name} is not accepted")
        return value


def _load_tensor(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _load_array(data: bytes, scalar: bool) -> Any:
    import numpy

    array = numpy.load(io.BytesIO(data), allow_pickle=False)
    return array[()] if scalar else array


def _constant(name: str) -> Any:
    value = getattr(torch, name)
    if not isinstance(value, _CONSTANTS):
        raise TypeError(f"torch.{name} is no constant")
    return value


_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
_KNOWN = (
    *(_load_tensor, _load_array, _constant, unpickle_meta, torch.Size, torch.device),
    *(set, frozenset, complex, bytearray, range, slice),
    *(collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter),
    *(list, dict, tuple, int, float, str, bool),  # the factories of a defaultdict
)


def _is_known(value: Any) -> bool:
    """Whether a message may contain this type: creating an object of the type runs only the type's own code."""
    if isinstance(value, type) and (
        issubclass(value, Enum)
        or is_dataclass(value)
        or (issubclass(value, tuple) and hasattr(value, "_fields"))
        or value in pytree.SUPPORTED_NODES
    ):
        return True
    return any(value is known for known in (*_KNOWN, *get_safe_globals()))


# ── the channel ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class ControlChannel:
    """Sends objects to one rank of the pipeline, or gathers them from all ranks."""

    group: Group
    ranks: Sequence[int]  # ranks[r] is the world rank of the pipeline's rank r
    status: RankStatus
    wait_timer: WaitTimer
    call: int = STEP  # the call that this rank is in
    _sending: list[Any] = field(default_factory=list)

    @contextmanager
    def in_call(self, call: int) -> Iterator[None]:
        """A context for a call of the pipeline other than a step."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def send_row(self, rank: int, row: Sequence[float], kind: int | None = None) -> None:
        """Start sending numbers; ``wait_sends`` waits for them. ``kind`` is by default the length of the row."""
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
        data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
        self.send_row(rank, [data.numel()], _OBJECT)
        self._send_tensor(rank, data)

    def recv(self, rank: int) -> Any:
        data = bytearray(int(self.recv_row(rank, _OBJECT)[0]))
        self._recv_tensor(rank, torch.frombuffer(data, dtype=torch.uint8))
        return decode(data)

    def wait_sends(self) -> None:
        """Wait until all messages that were sent have been received."""
        sending, self._sending = self._sending, []
        for rank, work, _ in sending:
            try:
                with self.status.waiting([self.ranks[rank]], "until its messages are received by"):
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
