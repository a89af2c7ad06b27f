"""The check before a run: everything that is missing, as one table."""
