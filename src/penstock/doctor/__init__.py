"""What ``penstock doctor`` does: ``look`` gathers facts, ``exchange`` tries messages, ``judge`` makes lines of it."""
