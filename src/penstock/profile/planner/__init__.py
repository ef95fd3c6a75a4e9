"""The planner: computes cuts, a schedule and the number of devices from costs."""
