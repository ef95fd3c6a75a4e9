"""Numbers for people."""

from __future__ import annotations

__all__ = ["counted", "milliseconds", "size"]


def counted(number: int, what: str) -> str:
    """As in "3 stages"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def milliseconds(seconds: float) -> str:
    """As in "1.23 ms"; from a second on, in seconds."""
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def size(number: float) -> str:
    """As in ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"
