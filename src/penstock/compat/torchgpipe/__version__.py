"""The version of torchgpipe whose API this is."""

__version__ = "0.0.7"
