"""As in torchgpipe."""

from penstock.compat.torchgpipe.worker import (
    ExcInfo,
    InQueue,
    OutQueue,
    Task,
    create_workers,
    join_workers,
    spawn_workers,
    worker,
)

__all__ = ["ExcInfo", "InQueue", "OutQueue", "Task", "create_workers", "join_workers", "spawn_workers", "worker"]
