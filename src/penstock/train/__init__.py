"""The objects of a training loop: pipeline, mesh, loader, scaler, progress."""
