"""The cache evicts the least recently used entry."""

from __future__ import annotations

from penstock.engine.step_protocol import LRUCache


def test_the_last_ones_used_are_kept() -> None:
    kept: LRUCache[str, int] = LRUCache(2)
    kept["a"], kept["b"] = 1, 2
    assert kept["a"] == 1  # used: "b" is the older one now
    kept["c"] = 3
    assert "b" not in kept
    assert (kept["a"], kept["c"], len(kept)) == (1, 3, 2)
    kept["a"] = 4  # so is what is put anew
    kept["d"] = 5
    assert "c" not in kept
    assert list(kept.values()) == [4, 5]
    kept.clear()
    assert len(kept) == 0
