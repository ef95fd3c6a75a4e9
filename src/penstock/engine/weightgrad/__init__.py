"""Weight gradients, deferred at the op: ``I`` computes input gradients, ``W`` computes what ``I`` queued.

    F   x ──linear──▶ y        the stage's modules run with their ops replaced: same values, another node in the graph
    I   gx ◀─ g @ weight ── g  the node computes the input's gradient and queues (x, g): no weight gradient yet
    W   weight.grad += gᵀ @ x  the queue is run, straight into ``.grad``, and frees x and g as it goes

A stage has one ``Recorder``, and one ``WeightGradQueue`` per micro-batch in flight:

    recorder = Recorder(module)
    queue = WeightGradQueue(recorder)
    with queue.recording():          # F
        output = module(x)
    with queue.taking():             # I
        torch.autograd.backward(output, grad)
    queue.run()                      # W

What is not covered (another op, a parameter with hooks, a checkpointed block) is left as it is, and autograd
computes it in ``I``. Folder: ``queue`` is the queue, ``record`` puts the ops in place, ``rules`` says when, the rest
are the ops.
"""

from __future__ import annotations

from penstock.engine.weightgrad.queue import WeightGradQueue, defer_weight_grad
from penstock.engine.weightgrad.record import WeightGradRecorder

__all__ = ["WeightGradQueue", "WeightGradRecorder", "defer_weight_grad"]
