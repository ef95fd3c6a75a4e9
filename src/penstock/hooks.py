"""Public hooks for libraries on top of Penstock, such as the facades in ``penstock.compat``.

Training scripts do not need them.

- ``tree_flatten``, ``tree_unflatten``, ``map_tensors``: nested tuples, lists and dicts of tensors;
- ``LayerChain``, ``chain_of``, ``marked_chain``, ``WholeModelChain``, ``build_plan``: convert a model to a chain of
  layers, and groups of layers to a ``Plan``;
- ``partition``: balanced groups of consecutive costs;  ``parse_bytes``: a size such as ``"16GiB"``;
- ``cut_points``, ``begin_block_of``, ``remove_begin_block``, ``mentions_marks``, ``recorder``: the marks of a model;
- ``Arguments``: the positional and the keyword arguments of one call, as the inputs of a step;
- ``Prefetcher``: an iterator that prefetches in a thread;
- ``grad_norm``, ``clip_grad_norm``: the norm of gradients, with a custom reduction over ranks;
- ``DeferredStatistics``: BatchNorm statistics of several forwards, committed together;
- ``find_loss``: the loss in the output of a model that computes it;
- ``is_checkpointing``: whether the current forward will be recomputed;
- ``defer_weight_grad``: called by an ``autograd.Function`` to defer its weight gradient to ``W``;
- ``verify_skippables``, ``SkipError``, ``SkipUseError``: checks of ``@skippable`` layers, and their errors;
- ``is_offloaded``: whether an optimizer keeps its state in host memory;
- ``with_training_modes``: a context manager that sets the ``training`` flags of modules.
"""

from __future__ import annotations

from penstock.engine.executor import with_training_modes
from penstock.engine.forward_context import is_checkpointing
from penstock.engine.loss import find_loss
from penstock.engine.message import flatten as tree_flatten
from penstock.engine.message import map_tensors
from penstock.engine.message import unflatten as tree_unflatten
from penstock.engine.recompute.batchnorm import DeferredStatistics
from penstock.engine.weightgrad import defer_weight_grad
from penstock.format import parse_bytes
from penstock.split import chain_of
from penstock.split.balance import partition
from penstock.split.marks import begin_block_of, cut_points, remove_begin_block
from penstock.split.plan import Arguments, LayerChain, WholeModelChain, build_plan
from penstock.split.skip import SkipError, SkipUseError, verify_skippables
from penstock.split.trace.errors import mentions_marks
from penstock.split.trace.front_end import marked_chain
from penstock.split.trace.state import recorder
from penstock.train.optimizer_offload import is_offloaded
from penstock.train.prefetch import Prefetcher
from penstock.train.state import clip_grad_norm, grad_norm

__all__ = [
    "Arguments", "DeferredStatistics", "LayerChain", "Prefetcher", "SkipError", "SkipUseError", "WholeModelChain",
    "begin_block_of", "build_plan", "chain_of", "clip_grad_norm", "cut_points", "defer_weight_grad",
    "find_loss", "grad_norm", "is_checkpointing", "is_offloaded", "map_tensors", "marked_chain", "mentions_marks",
    "parse_bytes", "partition", "recorder", "remove_begin_block", "tree_flatten", "tree_unflatten",
    "verify_skippables", "with_training_modes",
]  # fmt: skip
