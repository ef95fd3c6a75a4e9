"""The names of other systems, over Penstock."""
