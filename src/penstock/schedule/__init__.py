"""Schedules as plain data: made, verified, simulated, lowered and written without a device or a process."""
