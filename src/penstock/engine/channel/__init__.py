"""How messages get from one stage to another: within a process, or between two."""
