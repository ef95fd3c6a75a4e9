"""From costs to a plan: where to cut, in which order to work, on how many devices."""
