"""The report of a run, one page."""
