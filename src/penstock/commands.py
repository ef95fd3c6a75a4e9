"""The commands of the ``penstock`` command line, one file each (see ``penstock.cli``)."""
