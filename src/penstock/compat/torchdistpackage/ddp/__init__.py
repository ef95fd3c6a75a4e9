"""Replicas of a module."""

from penstock.compat.torchdistpackage.ddp.naive_ddp import NaiveDDP

__all__ = ["NaiveDDP"]
