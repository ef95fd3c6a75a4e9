"""Data that ships with the package: enough of MNIST to see a pipeline learn."""
