__version__ = "0.1.0"  # for modules that may not import the whole package
