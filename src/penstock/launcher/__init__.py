"""How ``penstock run`` starts a script on every rank, and tells how it ended."""
