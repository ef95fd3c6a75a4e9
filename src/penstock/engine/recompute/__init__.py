"""The package penstock.engine.recompute."""
