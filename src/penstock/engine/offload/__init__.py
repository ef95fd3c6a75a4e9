"""The package penstock.engine.offload."""
