"""The planner: from costs to cuts, a schedule and the number of devices."""
