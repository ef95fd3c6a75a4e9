"""``Pipe``: torchgpipe's ``GPipe``, with other words, and ties on one device."""

from __future__ import annotations

from itertools import combinations

from torch import nn

from penstock.compat.torchgpipe.gpipe import GPipe, verify_children
from penstock.compat.torchgpipe.gpipe import verify_children as verify_module
from penstock.compat.torchgpipe.microbatch import TensorOrTensors, check
from penstock.engine.message import flatten

__all__ = ["Pipe", "recommend_auto_balance", "verify_module"]


class Pipe(GPipe):
    """Trains an ``nn.Sequential`` as a pipeline of partitions, as ``torchgpipe.GPipe`` does.

    A parameter may stand in several partitions, if these are on one device. The input must be on the first device.
    """

    _name = "Pipe"

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """The module's output for a mini-batch, a tensor or a tuple of tensors: joined, on the last device."""
        check(input)
        for tensor in flatten(input)[0] if self.devices else ():
            here = self.devices[0]
            if tensor.device.type != here.type or here.index not in (None, tensor.device.index):
                raise RuntimeError(
                    f"the input is on {tensor.device}, but the first partition on {here}, and Pipe does not move "
                    "inputs: pass input.to(pipe.devices[0])"
                )
        return super().forward(input)

    def _verify(self, module: nn.Sequential) -> None:
        verify_children(module)

    def _verify_partitions(self) -> None:
        pairs = combinations(zip(self.partitions, self.devices, strict=True), 2)
        for (one, here), (other, there) in pairs:
            if here != there and set(one.parameters()) & set(other.parameters()):
                raise ValueError("module with duplicate parameters on distinct devices is not supported")

    @staticmethod
    def _recommend(message: str) -> str:
        return recommend_auto_balance(message)


def recommend_auto_balance(message: str) -> str:
    """A message about a wrong balance, and how to get a right one."""
    return f"""{message}

A balance can be measured, for as long as the model changes: see fairscale.nn.pipe.balance:

  from fairscale.nn.pipe.balance import balance_by_time

  balance = balance_by_time(partitions, model, sample)
  model = Pipe(model, balance, ...)
"""
