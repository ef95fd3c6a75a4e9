"""Channels between stages: within one process, between two processes, and for control messages."""
