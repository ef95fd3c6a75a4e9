"""The package penstock.engine.failure."""
