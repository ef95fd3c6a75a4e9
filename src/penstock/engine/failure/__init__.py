"""Failure detection: one cause for all ranks, dead processes, hangs, and waits that end when another rank fails."""
