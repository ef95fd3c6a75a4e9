"""Offload of activations and weights to the host, with copies that overlap with computation."""
