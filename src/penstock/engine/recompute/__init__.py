"""A recompute repeats a forward exactly: its random numbers, its buffers, and the values it may reuse."""
