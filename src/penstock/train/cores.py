"""How many CPU threads a process should use, of the cores that it shares with others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["set_by_user", "threads_for", "usable_cores"]


def usable_cores(proc: Path = Path("/proc/self/cgroup"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use: those it is bound to, or fewer where a container limits its time."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(proc, cgroups)
    return bound if quota is None else max(1, min(bound, int(quota)))


def threads_for(processes: int, cores: int, environ: Mapping[str, str]) -> int:
    """Threads for one of ``processes`` on this machine: its share of the cores, or what SLURM has set aside for it."""
    per_task = environ.get("SLURM_CPUS_PER_TASK", "") if "SLURM_PROCID" in environ else ""
    if per_task.isdigit() and "TORCHELASTIC_RUN_ID" not in environ:
        return max(1, min(int(per_task), cores))
    return max(1, cores // processes)


def set_by_user(environ: Mapping[str, str]) -> bool:
    """Whether OMP_NUM_THREADS is there because somebody wanted it. torchrun sets it to 1 where it is not set."""
    threads = environ.get("OMP_NUM_THREADS")
    if threads != "1" or "TORCHELASTIC_RUN_ID" not in environ:
        return threads is not None
    try:  # what torchrun itself was started with
        before = Path(f"/proc/{os.getppid()}/environ").read_bytes()
    except OSError:
        return False
    return any(entry.startswith(b"OMP_NUM_THREADS=") for entry in before.split(b"\0"))


def _quota(proc: Path, cgroups: Path) -> float | None:
    """The cores' worth of time that the control groups of this process allow; None where they allow all."""
    try:
        lines = [line.split(":", 2) for line in proc.read_text().splitlines()]
    except OSError:
        return None
    limits = []
    for _, controllers, path in lines:
        root = cgroups if not controllers else cgroups / "cpu"
        if controllers and "cpu" not in controllers.split(","):
            continue
        group = root / path.lstrip("/")
        for place in (group, *group.parents):  # a limit further up holds as well
            if root == place or root in place.parents:
                limits.append(_limit(place))
    return min((limit for limit in limits if limit is not None), default=None)


def _limit(group: Path) -> float | None:
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text().strip()
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError):
        return None
