"""Benchmarks against other libraries. Each module has ``run`` and ``show``, which prints a table."""
