"""The demo: a small network trained as a pipeline, beside the plain model."""
