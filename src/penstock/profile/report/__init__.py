"""The report page: where the time of a step goes, and what would make it shorter."""
