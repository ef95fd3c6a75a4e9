"""Side-by-side runs against peers. Each module has a ``run`` and prints a table."""
