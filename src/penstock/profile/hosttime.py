"""What messages take of the time of ranks that compute on the host, where sending and receiving is the host's work.

All ranks compute something, over and over, as in a step. Each sends a value to the next rank meanwhile, in its turn, so
that values come while others compute; and for comparison all compute as much, and nothing is sent:

    rank 0   ▕▔compute▔▏send▕▔compute▔▏    ▕▔compute▔▏send▕▔compute▔▏     …
    rank 1   ▕▔compute▔▏    ▕▔compute▔▏send▕▔compute▔▏    ▕▔compute▔▏send …

Counted is what this thread needs to begin and end it, and what the channel's own threads do: ranks compute with all
cores, so these have none of their own, and take that time from them. It is time on the cores and not on the wall, and
without that of the computing: so it does not matter what else the machine does, nor how long a value is waited for. It
is the mean and not the median: now and then gloo's thread comes while a value is being sent, and runs for milliseconds
until it may have what it needs. That is rare, and is much of what messages cost.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time, thread_time

import torch

from penstock.engine.channel.wire import Wire
from penstock.engine.meta import TensorMeta

__all__ = ["host_time"]

ROWS, WIDTH = 64, 1024  # of what is multiplied: it reads as much as a layer does, so that caches forget the values
LONGER, SHORTEST = 1.5, 0.001  # times as long as a value is under way; seconds
ROUNDS = 64


def host_time(out: Wire, back: Wire, size: int, slowest: float, turn: int) -> float:
    """The seconds that a value of ``size`` bytes takes of a rank's own time, at one end of its way.

    ``out`` leads to the next rank and ``back`` comes from the one before; all ranks call it, with a ``turn`` of 0 or 1,
    neighbours with different ones. ``slowest`` is how long the value is under way at most.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the threads of this process that compute are one, and the others are the channel's
    try:
        load = _load(max(SHORTEST, LONGER * slowest))
        exchanging, alone = (_cores(out, back, load, count, turn) for count in (size, 0))
    finally:
        torch.set_num_threads(before)
    return max(0.0, (exchanging - alone) / ROUNDS / 2)


def _load(seconds: float) -> Callable[[], None]:
    """Something to compute for about so long."""
    rows, matrix = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, WIDTH)
    found = []
    for _ in range(4):
        start = perf_counter()
        torch.mm(rows, matrix)
        found.append(perf_counter() - start)
    times = max(1, round(seconds / max(min(found), 1e-6)))

    def load() -> None:
        for _ in range(times):
            torch.mm(rows, matrix)

    return load


def _cores(out: Wire, back: Wire, load: Callable[[], None], size: int, turn: int) -> float:
    """The time of all threads on the cores, without that of the load. Of 0 bytes nothing is sent."""
    value = torch.zeros(size, dtype=torch.uint8)
    makers = back.makers([TensorMeta(value.shape, value.dtype)])
    computed, works = 0.0, list[object]()
    begin = process_time()
    coming = back.receive(makers)
    for number in range(ROUNDS):
        for half in (0, 1):
            if half == turn:
                out.wait(works)
                works = out.send([value])
            start = thread_time()
            load()
            computed += thread_time() - start
        after = back.receive(makers) if number < ROUNDS - 1 else []
        back.finish(coming)
        coming = after
    out.wait(works)
    return process_time() - begin - computed
