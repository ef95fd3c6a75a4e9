"""Activations and weights on the host, copied to and from the device while it computes."""
