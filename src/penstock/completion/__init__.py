"""Scripts with which shells complete ``penstock`` command lines: made from the parsers, one file for each shell."""
