"""The report page: use of time in a step, and advice to reduce it."""
