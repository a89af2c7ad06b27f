"""Studies that compare several runs."""
