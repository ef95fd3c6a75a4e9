"""The work of one rank: stages, programs, channels, failures."""
