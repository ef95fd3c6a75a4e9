"""Costs, plans and traces: what a pipeline will take, and what it took."""
