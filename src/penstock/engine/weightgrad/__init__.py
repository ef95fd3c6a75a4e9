"""Weight gradients deferred at the op: ``I`` computes input gradients and queues the weight gradients for ``W``.

    F   x ──linear──▶ y        the stage's modules run with deferring ops: same values, another autograd node
    I   gx ◀─ g @ weight ── g  the node computes the input's gradient and queues (x, g): no weight gradient yet
    W   weight.grad += gᵀ @ x  the queue is run, straight into ``.grad``, and frees x and g as it goes

A stage has one ``WeightGradRecorder``, and one ``WeightGradQueue`` per micro-batch in flight:

    recorder = make_recorder(module)
    queue = WeightGradQueue(recorder)
    with queue.recording():          # F
        output = module(x)
    with queue.deferring():          # I
        torch.autograd.backward(output, grad)
    queue.run()                      # W

Everything else (another op, a parameter with hooks, a checkpointed block) is left to autograd, which computes its
gradients in ``I``.
"""

from __future__ import annotations

from penstock.engine.weightgrad.queue import WeightGradQueue, WeightGradRecorder, defer_weight_grad
from penstock.engine.weightgrad.record import make_recorder

__all__ = ["WeightGradQueue", "WeightGradRecorder", "defer_weight_grad", "make_recorder"]
